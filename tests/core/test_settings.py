"""params.yaml is strict: what is misspelt, missing or out of range ends in one line with the key and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from tasks.core.settings import Paths, Settings, check_section_names, load, load_paths, read_params
from tasks.storage.settings import PathsSettings
from tasks.tools.judge.settings import JudgeSettings
from tasks.tools.settings import CacheSettings


class Oven(Settings):
    degrees: int = Field(ge=50, le=250)
    share: float = Field(gt=0, le=1)


class BakeSettings(Settings):
    seed: int
    oven: Oven


GOOD: dict[str, Any] = {"seed": 3, "oven": {"degrees": 180, "share": 0.5}}


def message(params: dict[str, object]) -> str:
    with pytest.raises(ValueError) as caught:
        load(BakeSettings, params)
    return str(caught.value)


def test_good_params_are_read_and_cannot_be_changed_afterwards() -> None:
    settings = load(BakeSettings, GOOD)
    assert (settings.seed, settings.oven.degrees, settings.oven.share) == (3, 180, 0.5)
    with pytest.raises(ValueError):
        settings.seed = 4


def test_sections_of_other_stages_are_none_of_this_stages_business() -> None:
    assert load(BakeSettings, {**GOOD, "train": {"anything": 1}}) == load(BakeSettings, GOOD)


def test_a_misspelt_key_is_refused_with_the_nearest_name() -> None:
    text = message({"seed": 3, "oven": {"degrees": 180, "share": 0.5, "degres": 200}})
    assert text == ("params.yaml: oven.degres is not a setting, so it would have no effect. Did you mean degrees?")


def test_a_key_like_no_other_is_refused_with_every_known_name() -> None:
    assert message({"seed": 3, "oven": {**GOOD["oven"], "zzz": 1}}).endswith("Known names: degrees, share.")


def test_a_key_written_in_place_of_another_is_one_mistake_and_one_line() -> None:
    (line,) = message({"seed": 3, "oven": {"degree": 180, "share": 0.5}}).splitlines()
    assert "oven.degree is not a setting" in line
    assert "Did you mean degrees?" in line


def test_a_missing_key_that_no_misspelt_key_is_near_to_has_a_line_of_its_own() -> None:
    lines = message({"seed": 3, "oven": {"degrees": 180, "zzz": 0.5}}).splitlines()
    assert any("oven.share is missing" in line for line in lines)
    assert len(lines) == 2


@pytest.mark.parametrize(("oven", "what"), [(None, "null"), ([1], "a list"), ("hot", "a text"), (True, "true")])
def test_a_section_that_is_something_else_is_named_without_our_class(oven: object, what: str) -> None:
    text = message({"seed": 3, "oven": oven})
    assert f"oven must be a section with keys, and is {what}" in text
    assert "Oven" not in text


def test_a_key_given_twice_is_found_at_the_line_of_the_second(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("oven:\n  share: 1\n  degrees: 50\n  share: 2\n")
    with pytest.raises(ValueError, match=r"'share' is given twice.*line 4"):
        read_params(tmp_path / "params.yaml")


def test_a_missing_section_is_named() -> None:
    assert message({"seed": 3}).startswith("params.yaml: oven is missing")


@pytest.mark.parametrize("degrees", [49, 251])
def test_a_value_out_of_range_is_named_with_its_bound(degrees: int) -> None:
    text = message({"seed": 3, "oven": {"degrees": degrees, "share": 0.5}})
    assert f"oven.degrees = {degrees} is refused" in text
    assert ("greater than or equal to 50" in text) == (degrees == 49)


@pytest.mark.parametrize("degrees", ["180", 180.0, True, None, [180]])
def test_a_value_of_another_type_is_never_converted(degrees: object) -> None:
    assert "oven.degrees = " in message({"seed": 3, "oven": {"degrees": degrees, "share": 0.5}})


@pytest.mark.parametrize("share", [float("nan"), float("inf"), 0.0, 1.01])
def test_a_share_is_a_finite_number_above_0_and_at_most_1(share: float) -> None:
    assert "oven.share = " in message({"seed": 3, "oven": {"degrees": 180, "share": share}})


def test_a_whole_number_will_do_where_a_float_is_meant() -> None:
    assert load(BakeSettings, {"seed": 3, "oven": {"degrees": 180, "share": 1}}).oven.share == 1.0


def test_each_mistake_has_a_line_of_its_own() -> None:
    assert len(message({"seed": "3", "oven": {"degrees": 20, "share": 0.5}}).splitlines()) == 2


class Dough(Settings):
    rest: Literal["auto"] | Annotated[float, Field(gt=0)]
    flours: Literal["any"] | list[str]
    prices: dict[str, float]


class DoughSections(Settings):
    dough: Dough


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rest": -1}, "dough.rest = -1 is refused: Input should be 'auto' or a number above 0. "),
        ({"rest": "soon"}, "dough.rest = 'soon' is refused: Input should be 'auto' or a number. "),
        ({"flours": "rye"}, "dough.flours = 'rye' is refused: Input should be 'any' or a list. "),
        ({"flours": [1]}, "dough.flours = a list is refused: Input should be 'any' or a valid string. "),
        ({"prices": [1]}, "dough.prices = a list is refused: Input should be a mapping, such as {name: value}. "),
    ],
)
def test_a_value_that_may_be_a_word_or_something_else_is_one_mistake(changed: dict[str, Any], words: str) -> None:
    dough: dict[str, Any] = {"rest": "auto", "flours": "any", "prices": {}}
    with pytest.raises(ValueError) as error:
        load(DoughSections, {"dough": dough | changed})
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("owner", [CacheSettings, JudgeSettings, PathsSettings])
def test_a_folder_under_a_home_that_no_shell_expands_is_refused_with_its_whole_path(owner: type[Settings]) -> None:
    (folder,) = [name for name, field in owner.model_fields.items() if name in ("folder", "cache_folder", "artifacts")]
    with pytest.raises(ValidationError) as refused:
        owner.model_validate({folder: "~/results"})
    texts = [error["msg"] for error in refused.value.errors() if error["loc"] == (folder,)]
    assert [text.rpartition(" ")[2] for text in texts] == [str(Path.home() / "results")]


def test_a_section_no_stage_reads_is_a_typo() -> None:
    with pytest.raises(ValueError, match=r"'trian' is not a section turnwise reads.*Did you mean train\?"):
        check_section_names({"train": {}, "trian": {}}, {"train", "curate"})
    check_section_names({"train": {}}, {"train", "curate"})


def test_a_missing_or_broken_params_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no such file.*Run from the project's root"):
        read_params(tmp_path / "params.yaml")
    for text, found in (("a: [1", "not valid YAML"), ("- 1\n", "found a list"), ("", "the file is empty")):
        (tmp_path / "params.yaml").write_text(text)
        with pytest.raises(ValueError, match=found) as caught:
            read_params(tmp_path / "params.yaml")
        assert "\n" not in str(caught.value)


def test_every_stage_has_a_folder_and_every_split_a_file() -> None:
    paths = load_paths({"paths": {"artifacts": "out"}})
    assert paths.stage("train") == Path("out/train")
    assert Paths("out").split("test") == Path("out/curate/test.jsonl")


@pytest.mark.parametrize("paths", [None, {}, {"artifacts": ""}, {"artifacts": 3}, "artifacts"])
def test_a_missing_artifacts_folder_setting_is_one_line(paths: object) -> None:
    with pytest.raises(ValueError, match=r"paths\.artifacts must name the folder"):
        load_paths({"paths": paths})
