"""Names that nobody has, of two parts: an onset of three letters, and an ending that says what kind of thing it is.

Each part is one token of the embedded model, so a name it never saw is made of parts that it did see.
"""

from __future__ import annotations

import random
from itertools import product

ONSETS = ["".join(parts) for parts in product("BDGKLMPRTV", "aeiou", "bdflmtxz")]
ENDINGS = {
    "person": "anda brec dric esta fina hild ibel jorn kath lise mund nora olfe pina rick sten tild ulfa wina zara",
    "guild": "arms axis bolt forge glass hide iron kiln loom quill rope wheel",
    "town": "bridge church dale field haven gate holm mere mouth stead thorpe wick",
    "river": "beck brook burn eddy foss rill",
    "song": "chant dirge elegy fugue hymn lilt ode psalm rhyme sonata tune verse",
}


def parts_of_names() -> list[str]:
    return [*ONSETS, *(ending for endings in ENDINGS.values() for ending in endings.split())]


def draw_names(kind: str, num: int, rng: random.Random) -> list[str]:
    """`num` different names of one kind; deterministic in the stream."""
    names = [onset + ending for onset in ONSETS for ending in ENDINGS[kind].split()]
    return rng.sample(names, num)
