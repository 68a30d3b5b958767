"""turnwise: the pipeline without Prefect. `python -m tasks <stage>` runs one stage; README.md shows the rooms.

Words, one per idea:

    problem       a dataset row: a request, the environment's state to answer it in, a reference solution
    category      one of a few names that each problem has; results are reported per category
    environment   everything outside the model: tools, the state they change, the check of success
    turn          one message of the model, with the calls in it and the reply to each
    trajectory    one episode, token by token; `sampled_mask` is True where the policy chose the token
    sequence      tokens that were only ever appended to: all of most trajectories, else one of several
    group         the trajectories of one problem in one draw: an advantage is relative to it
    iteration     one batch of rollouts and its optimizer steps
    snapshot      a checkpoint that may be promoted
    baseline      the base model before training; scripted baselines are policies without a model
    champion      the model in production; the challenger is this run's best snapshot, its opponent what it must beat
    probe         the check after a weight refresh; drift probes are curation's
    split         train (learn), select (choose the snapshot), test (confirm it, once per run)
    overlay       a YAML mapping of what differs from params.yaml: a profile, a variant of the ablation
    task          only what Prefect means by it
"""
