"""The data card: what is in the curated splits, what was left out of them and why, and what they share.

`card.json` holds the numbers and `card.html` shows them; both are made by `curate` from the problems alone, so that the
same data has the same card. Lengths of prompts are in characters, of the first request and of the JSON of the tools
that are shown for it: which tokens those become is the model's business, and no model is known at curation. Left out:
how hard the problems are for a model, which is what `assess` measures.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks.core.records import Problem
from tasks.stages.curate.splitting import SPLITS, HasProblem, shared_groups
from tasks.tools.base import Environment, Tool, tools_for

MAX_IDS = 10  # shown of what was left out
PERCENTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
MEASURES = {
    "num_calls": "calls of the reference",
    "num_requests": "user requests",
    "num_tools": "tools shown with the first request",
    "prompt_characters": "characters of the prompt",
}
Splits = Mapping[str, Sequence[HasProblem]]


def describe_splits(environment: Environment, splits: Splits, left_out: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The numbers of the card. `left_out` are the ids that are in no split, by reason."""
    problems = {name: [row.problem for row in splits[name]] for name in SPLITS}
    measure = measures(environment)
    return {
        "num_problems": {name: len(problems[name]) for name in SPLITS},
        "num_split_groups": {name: len({problem.split_group for problem in problems[name]}) for name in SPLITS},
        "by_category": {name: dict(Counter(problem.category for problem in problems[name])) for name in SPLITS},
        "distributions": {name: distributions([measure(problem) for problem in problems[name]]) for name in SPLITS},
        "shared_split_groups": shared_split_groups(splits),
        "left_out": [
            {"reason": reason, "num_problems": len(ids), "ids": list(ids[:MAX_IDS])}
            for reason, ids in left_out.items()
            if ids
        ],
    }


def measures(environment: Environment) -> Callable[[Problem], dict[str, int]]:
    """What is measured of a problem. The JSON of a set of tools is written once, however many problems show it."""
    lengths: dict[tuple[str, ...], int] = {}

    def measure(problem: Problem) -> dict[str, int]:
        tools = tools_for(environment, problem)
        names = tuple(tool.name for tool in tools)
        if names not in lengths:
            lengths[names] = len(rendered(tools))
        return {
            "num_calls": sum(len(turn.calls) for turn in problem.reference),
            "num_requests": len(problem.requests),
            "num_tools": len(tools),
            "prompt_characters": len(problem.requests[0]) + lengths[names],
        }

    return measure


def rendered(tools: Sequence[Tool]) -> str:
    """The tools as most chat templates show them: the JSON of one a line."""
    return "\n".join(json.dumps(tool.schema(), ensure_ascii=False) for tool in tools)


def distributions(rows: Sequence[Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Of each measure the least, the median, the 95th percentile and the most; percentiles by nearest rank, so that
    each is the value of some problem. Empty where there is no row.
    """
    if not rows:
        return {}
    ordered = {name: sorted(row[name] for row in rows) for name in MEASURES}
    ranks = {word: max(0, math.ceil(share * len(rows)) - 1) for word, share in PERCENTILES.items()}
    return {name: {word: values[rank] for word, rank in ranks.items()} for name, values in ordered.items()}


def shared_split_groups(splits: Splits) -> dict[str, Any]:
    """How many split groups are in several splits, how many problems of each split are of such a group."""
    shared = shared_groups(splits)
    return {
        "num_groups": len({row.problem.split_group for name in SPLITS for row in splits[name]}),
        "num_shared": len(shared),
        "num_problems": {name: sum(row.problem.split_group in shared for row in splits[name]) for name in SPLITS},
        "between": dict(Counter(" and ".join(names) for names in shared.values())),
    }


def render_card(card: Mapping[str, Any]) -> str:
    """The card as a page: one file, no script, nothing from the network, every value escaped."""
    import jinja2

    categories: Counter[str] = Counter()
    for counts in card["by_category"].values():
        categories.update(counts)
    most = {
        name: max((split[name]["max"] for split in card["distributions"].values() if split), default=1)
        for name in MEASURES
    }
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(PAGE)
    return template.render(
        card=card,
        splits=SPLITS,
        categories=sorted(categories.items(), key=lambda item: (-item[1], item[0])),
        measures=MEASURES,
        most=most,
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,"><title>{{ card.environment }}: data card · turnwise</title><style>
:root { --page: #f5f6f9; --paper: #fff; --ink: #1c2030; --muted: #5c6373; --line: #e3e6ec;
  --train: #2b59d9; --select: #a86400; --test: #0b7a53; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --page: #0d0f15; --paper: #14171f; --ink: #e8eaf0; --muted: #98a0b3;
  --line: #272c38; --train: #7d9dff; --select: #e0a030; --test: #3ecf97; --bad: #ff8a80 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 66rem; padding: 2.5rem 1.5rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
h1 { margin: 0 0 .5rem; font-size: 2rem; line-height: 1.15; letter-spacing: -.02em; overflow-wrap: anywhere }
h2 { margin: 0 0 .5rem; font-size: 1.15rem } p { margin: 0 0 .75rem } a { color: var(--train) }
code { font-size: .86em; overflow-wrap: anywhere } .muted { color: var(--muted); font-size: .9rem }
.panel, .tile { padding: 1.4rem; border: 1px solid var(--line); border-radius: 12px; background: var(--paper) }
.panel { margin: 0 0 1.25rem; overflow-x: auto } .panel > :last-child { margin-bottom: 0 }
.tiles { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 1.25rem; margin: 1.5rem 0 1.25rem }
.tile p { margin: 0 } .number { font-size: 2.2rem; font-weight: 650; line-height: 1.2; color: var(--tone) }
.train { --tone: var(--train) } .select { --tone: var(--select) } .test { --tone: var(--test) }
table { width: 100%; border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { padding: .4rem 0 .4rem 1rem; border-top: 1px solid var(--line); text-align: right; font-weight: 400 }
thead th { border-top: 0; color: var(--muted); font-size: .82rem; white-space: nowrap }
th:first-child, .text { padding-left: 0; text-align: left; overflow-wrap: anywhere }
.plot { width: 32% } .bar { display: flex; gap: 2px; height: 11px }
.bar i, .swatch { background: var(--tone); border-radius: 2px }
.swatch { display: inline-block; width: 9px; height: 9px; margin-right: .4rem }
.track { position: relative; height: 14px; border-bottom: 1px solid var(--line) }
.track i { position: absolute; top: 3px; height: 8px; min-width: 2px; border-radius: 2px; background: var(--tone) }
.track i.tail { opacity: .3 } .warning { color: var(--bad) }
@media (max-width: 40rem) { .tiles { grid-template-columns: 1fr } .plot { display: none } }
</style></head><body>
<p class="muted">turnwise · data card</p>
<h1>{{ card.environment }}</h1>
<p class="muted">Environment <code>{{ card.fingerprint }}</code>, divided by the rule <code>{{ card.split }}</code>,
{{ "{:,}".format(card.num_demonstrations) }} demonstrations.
{{ card.expectations | selectattr("success") | list | length }} of
{{ card.expectations | length }} expectations hold: <a href="../validation/index.html">validation</a>.</p>

<div class="tiles">{% for name in splits %}
<div class="tile {{ name }}"><p>{{ name }}</p><p class="number">{{ "{:,}".format(card.num_problems[name]) }}</p>
<p class="muted">problems of {{ "{:,}".format(card.num_split_groups[name]) }} split groups</p></div>
{% endfor %}</div>

<section class="panel"><h2>Split groups on both sides</h2>
<p class="muted">A split group is what a solution hinges on, such as a ground truth that several problems have.</p>
{% set shared = card.shared_split_groups %}
{% if shared.num_shared %}
<p><strong class="warning">{{ shared.num_shared }} of {{ shared.num_groups }} groups are in several splits</strong>:
{% for names, num in shared.between.items() %}{{ num }} in {{ names }}{{ ", " if not loop.last else "." }}
{% endfor %}</p>
<p class="muted">Problems of such a group: {% for name in splits %}{{ shared.num_problems[name] }} of {{ name }}
{{- ", " if not loop.last else "." }}
{% endfor %} What training learnt on one of them, it knows of the other: scores on select and test are too high by
that.</p>
{% else %}<p>None: each of the {{ "{:,}".format(shared.num_groups) }} groups is in one split.</p>{% endif %}
</section>

<section class="panel"><h2>Problems of each category</h2>
<table><thead><tr><th scope="col">category</th><th class="plot"></th>{% for name in splits %}
<th scope="col"><span class="swatch {{ name }}"></span>{{ name }}</th>{% endfor %}
<th scope="col">all</th></tr></thead><tbody>
{% for category, total in categories %}<tr><th scope="row">{{ category }}</th><td class="plot"><div class="bar">
{% for name in splits %}{% set num = card.by_category[name].get(category, 0) %}
{% if num %}<i class="{{ name }}" style="width: {{ "%.2f" | format(100 * num / categories[0][1]) }}%"></i>{% endif %}
{% endfor %}</div></td>
{% for name in splits %}<td>{{ "{:,}".format(card.by_category[name].get(category, 0)) }}</td>{% endfor %}
<td>{{ "{:,}".format(total) }}</td></tr>
{% endfor %}</tbody></table></section>

<section class="panel"><h2>Sizes</h2>
<p class="muted">A prompt is the first request and the JSON of the tools shown with it, in characters: how many tokens
that is depends on the model. Bars reach from the median to the 95th percentile, and pale from the least to the most.
</p>
<table><thead><tr><th scope="col">a problem's</th><th class="plot"></th><th scope="col">min</th>
<th scope="col">median</th><th scope="col">p95</th><th scope="col">max</th></tr></thead><tbody>
{% for measure, words in measures.items() %}{% for name in splits if card.distributions[name] %}
{% set at = card.distributions[name][measure] %}{% set scale = 100 / ([most[measure], 1] | max) %}
<tr><th scope="row"><span class="swatch {{ name }}"></span>{{ words }}, {{ name }}</th>
<td class="plot"><div class="track {{ name }}">
{% for kind, low, high in (("tail", at.min, at.max), ("core", at.median, at.p95)) %}
<i class="{{ kind }}" style="left: {{ "%.2f" | format([scale * low, 99] | min) }}%;
  width: {{ "%.2f" | format(scale * (high - low)) }}%"></i>
{% endfor %}</div></td>
{% for word in ("min", "median", "p95", "max") %}<td>{{ "{:,}".format(at[word]) }}</td>{% endfor %}</tr>
{% endfor %}{% endfor %}</tbody></table></section>

<section class="panel"><h2>Left out</h2>
{% if card.left_out %}<table><thead><tr><th scope="col">why</th><th scope="col">problems</th>
<th class="text" scope="col" style="padding-left: 1rem; text-align: left">such as</th></tr></thead><tbody>
{% for item in card.left_out %}<tr><th scope="row">{{ item.reason }}</th><td>{{ "{:,}".format(item.num_problems) }}</td>
<td class="text" style="padding-left: 1rem"><code>{{ item.ids[:3] | join(", ") }}</code></td></tr>
{% endfor %}</tbody></table>{% else %}<p>Nothing: every row of the source is in a split.</p>{% endif %}
</section>
</body></html>
"""
