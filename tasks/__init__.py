"""What the flow runs; no Prefect inside. `python -m tasks <stage>` runs one stage, and this page is the map.

The stages, in order, one file each: Settings (which sections of `params.yaml` it reads) and `run(settings, paths)`.

    curate      problems → validated, deduplicated, split into train, select and test
    assess      the base model, zero-shot: is there enough success for reinforcement learning to find?
    warm_start  supervised fine-tuning on expert episodes, or a pointer to the base where none is needed
    train       reinforcement learning; leaves snapshots
    evaluate    the best snapshot on select, confirmed on test
    promote     against the reigning champion: registry and alias, or a clear no

`training` is one GRPO run put together, with checkpoints and the collapse sentinel: `grouping` plays and scores
what it learns from, `snapshots` keeps what it leaves; `pipelining` lets its rollouts run ahead of the trainer;
`ablate` trains `variants` of it side by side; `resume` names the folder a killed stage goes on from, `provenance` what
a stage ran with, `trained_on` the file that says what a model learnt from;
`demonstrations` are expert episodes for a warm start; `raw_problems` reads rows, `references` replays their
solutions (`replays` each distinct one once), `splitting` divides problems into train, select and test, `validation`
holds them against the `expectations`, `data_card` describes them; `racing` drops snapshots that are clearly worse,
`playing` plays several models and goes on after a kill, `frontier` is the model behind an endpoint, `evaluations` notes
that test was looked at; `pinning` keeps the environment of curation and tells later stages what has changed since;
`doctor` looks for what would go wrong in training, with the checks of `checkup`, `outlook` for
what curation can already tell of it; `cache` freezes what
tools answered; `score` judges calls that were made elsewhere; `baselines` are a world's policies that need no
model; `export` writes trajectories in the format of `atif`, `compare` pairs those of two policies, both wherever
`sources` finds them; `stored` reads them and tells what one does not say itself. In a promotion `challenger` and
`champion` are read or measured, `origin` is what the challenger was made with, `unseen` the test problems neither
side has learnt from, `decision` is what decision.json holds, `decision_files` what of it is kept, `orders` what a
person may add to the policy; `crown` carries it out, `approvals` complete what waits for a person, `rollback` takes
it back, `lineage` and `fetch` show and load what is registered, `reproduction` has the commands that make it again,
`rebuild` runs and compares them, `registry` holds MLflow's aliases against the journal of who became champion and
why.

Underneath, downward only (tests/contracts/test_imports.py walks the imports):

    stages        their order, the check of the whole of params.yaml, one run at a time in a folder
    rollouts      engines, and the loop that turns a problem into a trajectory
    learning      advantages, batches, losses, the trainers; never sees an environment
    measurement   statistics with intervals, the chart, the report
    tracking      MLflow: runs, registry, lineage
    environments  worlds: tools, the state behind them, the check of success
    rewards       pure functions of problem and trajectory
    records       Problem, Trajectory and the other nouns everything shares; `settings`, `storage` beside them
    architecture  whether packing and the engine compute what a model does, and its log-probs by its own forward
    json_text     JSON of models, tools and files, with a limit to its nesting
    kept_files    what is read again later, of which shape (`file_shapes`), and the way back where it is damaged;
                  `databases` looks at SQLite files, `model_files` at the weights of a model folder
    terminal      the one way to what people read, `console` its tables; `surroundings` is the machine around a run

Words, one an idea:

    problem       a dataset row: a request, a world to answer it in, a reference solution
    environment   everything outside the model: tools, the state they change, the check of success
    turn          one message of the model, with the calls in it and the reply to each
    trajectory    one episode, token by token; `sampled_mask` is True where the policy chose the token
    group         the trajectories of one problem in one draw: what an advantage is relative to
    iteration     one batch of rollouts and its optimizer steps
    snapshot      a checkpoint that may be promoted
    champion      the model in production; its opponent is the challenger
    split         train (learn), select (choose the snapshot), test (confirm it, once a run)
    task          only what Prefect means by it
"""
