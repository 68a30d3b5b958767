"""Everything that uses Prefect. Start at `retrain.py`: the whole chain as one flow.

retrain        the flow: stages in order, promotion, report steps          a stage as a Prefect task: `dvc repro
--single-item <stage>` processes      a stage as a child process, with its output server         Prefect's server for
one command, and the environment variables that Prefect reads prefect_runs   stops a flow that Prefect no longer runs;
closes runs that died mlflow_runs    MLflow's runs, written in a background thread supervisor     `serve`: keeps the
server and the schedule running, and ends both schedule       Prefect's runner for the flow, a child of the supervisor
__main__       python -m flows run | serve
"""
