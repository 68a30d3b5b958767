"""turnwise: what the flow runs, with no Prefect inside. `python -m tasks <stage>` runs one stage; this is the map.

`stages/` is what the pipeline does, `commands/` is what a person asks for, everything else is a library. A library
never imports a stage. A stage, an environment and an engine are each one folder, found by its name.

The stages, in order; each folder has `stage.py` with `run(settings, paths)`, and `settings.py`:

    curate      problems → validated, deduplicated, split into train, select and test
    assess      the base model, zero-shot: is there enough success for reinforcement learning to find?
    warm_start  supervised fine-tuning on expert episodes, or a pointer to the base where none is needed
    train       reinforcement learning; leaves snapshots
    evaluate    the best snapshot on select, confirmed on test
    promote     against the champion: registry and alias, or a clear no

The rooms, from the top down. A room imports from lower lines only (tests/contracts/test_imports.py):

    commands      what a person asks for beside the stages: doctor, report --compare, export, ablate, rollback, …
    pipeline      the order of the stages, one run at a time per folder, errors as one line
    stages        the pipeline
    report        summary.json, the chart, the report page and the trajectory browser
    engines       transformers, vllm, endpoint, scripted: what turns a prompt into tokens
    tracking      MLflow: runs, traces, registry, lineage
    rollouts      the loop that turns a problem into a trajectory
    learning      advantages, batches, losses, the GRPO and SFT trainers; never sees an environment
    measurement   statistics with intervals: numbers only
    drift         whether the environment still answers as it did at curation
    environments  travel_desk, bfcl, mcp: tools, the state behind them, the check of success
    custom        your environments, reward functions and checkers
    rewards       pure functions of problem and trajectory
    tools         the base of every environment: schemas, validation, faults, the cache of replies
    chat          messages ↔ tokens, by the model's own template
    models        model folders, attention, the built-in model
    core          records, settings, files, pages, text: imports nothing of ours

Words, one per idea:

    problem       a dataset row: a request, an environment's state to answer it in, a reference solution
    category      what results are reported by: one of a few names that each problem has
    environment   everything outside the model: tools, the state they change, the check of success
    turn          one message of the model, with the calls in it and the reply to each
    trajectory    one episode, token by token; `sampled_mask` is True where the policy chose the token
    group         the trajectories of one problem in one draw: what an advantage is relative to
    iteration     one batch of rollouts and its optimizer steps
    snapshot      a checkpoint that may be promoted
    baseline      the base model before training; scripted baselines are policies without a model
    champion      the model in production; the challenger is this run's best snapshot, its opponent what it must beat
    probe         the check after a weight refresh; drift probes are curation's
    split         train (learn), select (choose the snapshot), test (confirm it, once per run)
    overlay       a YAML mapping of what differs from params.yaml: a profile, a variant of the ablation
    task          only what Prefect means by it
"""
