"""Prefect lives here and nowhere else. Start at `retrain.py`, the whole chain as one readable flow.

retrain        stages in order, the promotion, the report; MLflow beside them
steps          a stage as a Prefect task: `dvc repro --single-item <stage>`, its output, whether DVC found it done
processes      a stage as a child process, and its output as it comes
server         Prefect's server for the length of a run, and the environment Prefect is imported in
prefect_runs   a flow whose server is gone stops; runs that died are closed
supervisor     `serve`: keeps server and schedule running, and ends both
schedule       Prefect's runner for the flow, a child of the supervisor
__main__       python -m flows run | serve
"""
