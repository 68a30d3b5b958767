"""MLflow lives here and nowhere else; importing these modules does not import it yet.

connection   settings and the client
metrics      numbers in batches, and live while `train` runs
runs         a parent run a flow and a child a stage, made from stage files: `stage_results` says what of them is shown,
             `tables` how rows are, `processes` whose a run is
traces       a sample of evaluation's episodes, turn by turn
registry     model versions and the champion
lineage      where a model came from, as the tags of its version
journal      every decision and every move of an alias; `waiting` is the decision that waits for a person
names        which names MLflow takes; `faults` what its errors mean
"""
