"""MLflow is used only here, and imported only when a function needs it.

settings, connection     where MLflow is, which names it takes, a client, its errors in one line
metrics                  numbers in batches, and live while `train` runs; tables
runs                     a parent run per flow and a child per stage, from stage files (`stage_results`, `datasets`)
traces, trace_choice     a sample of evaluation's episodes, turn by turn
registry, versions       model versions; their files (`model_files`), lineage (`lineage`) and page (`model_page`)
journal, history         every decision and every move of an alias, and their summary
aliases, registry_lock   who is champion, moved by one process at a time; `waiting` is a decision that waits
holdout_reuse            how often test problems were looked at
model_uri                `models:/NAME@champion`, looked up
"""
