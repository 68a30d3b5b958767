"""Prefect lives here and nowhere else. Start at `retrain.py`, the whole chain as one readable flow.

retrain        stages in order, the promotion, the report; MLflow beside them
steps          a stage as a Prefect task: `dvc repro --single-item <stage>`, its output, whether DVC found it done
processes      a child in its own process group, its output as it comes, and a guardian that ends it if the flow dies
server         Prefect's own server for the length of a run, ours alone, and the environment Prefect is imported in
prefect_runs   a flow whose server is gone stops; runs that died are closed
supervisor     `serve`: keeps server and schedule running, and ends all of it as one
schedule       Prefect's runner for the flow, a child of the supervisor
__main__       python -m flows run | serve
"""
