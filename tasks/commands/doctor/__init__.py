"""What `python -m tasks doctor` looks at, one file a part of the body; `tasks/commands/doctor/doctor.py` lists the
checks.

    findings      pass, warn or fail, with one short finding and a remedy
    context          what is examined: settings, curated problems, the world, the model's tokenizer, references played
    model         the model itself, as far as it is known without its weights
    conversation  chat template, loss mask, token budgets, what requests and replies hold
    world         every tool answers, episodes repeat and stay apart, the pin, cache and faults
    scoring       references score 1, doing nothing does not, rewards stay in range
    data          splits share nothing, files are as curation wrote them
    machine       threads, memory, disk and time against what is here
    estimates     what a run would need of them
    arguments     a schema-valid call for a tool that no reference uses

No weights are loaded by any of them.
"""
