"""What is refused before any weights are read, from a model folder that has none; and whose weights are measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.chat.format import load_chat
from tasks.core.records import Trajectory
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models import architecture
from tasks.models.architecture import model_logp
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.rollouts import load
from tasks.rollouts.collect import sample_episodes
from tasks.rollouts.engine import Engine, FixedWeights
from tasks.rollouts.finished import FinishedEpisodes
from tasks.rollouts.load import Engines, load_checked_chat
from tasks.rollouts.settings import PlaySettings
from tests import tiny
from tests.engine_benches import engine_settings, vllm_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tiny.model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    return folder


def refused(folder: Path, **sampling: int) -> str:
    with pytest.raises(ValueError) as error:
        load_checked_chat(folder, TravelDesk(), tiny.problems(5), tiny.SAMPLING.model_copy(update=sampling))
    return str(error.value)


def rewrite_template(folder: Path, old: str, new: str) -> None:
    file = folder / "chat_template.jinja"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_folder_that_can_converse_passes(folder: Path) -> None:
    load_checked_chat(folder, TravelDesk(), tiny.problems(5), tiny.SAMPLING)


def test_a_prompt_that_leaves_no_room_names_the_problem_and_the_setting(folder: Path) -> None:
    message = refused(folder, max_tokens_per_episode=8)
    chat = load_chat(folder)
    longest = max(tiny.problems(5), key=lambda problem: len(chat.prompt_ids(problem.requests[0], [])))
    assert f"problem {longest.id!r}: its prompt has" in message
    assert "sampling.max_tokens_per_episode is 8, so no turn fits. Set that to more than" in message


def test_a_budget_beyond_the_models_context_is_refused(folder: Path) -> None:
    assert "the model's context is 256 tokens" in refused(folder, max_tokens_per_episode=300)


def test_a_template_that_closes_a_message_with_ordinary_text_is_refused(folder: Path) -> None:
    rewrite_template(folder, "{{ message.content }}<|im_end|>", "{{ message.content }} done")
    message = refused(folder)
    assert "an ordinary token" in message
    assert "special end-of-turn token" in message


def test_a_template_that_never_closes_a_message_is_refused(folder: Path) -> None:
    rewrite_template(folder, "{{ message.content }}<|im_end|>", "{{ message.content }}")
    assert "a turn would never end" in refused(folder)


def test_a_template_whose_history_changes_is_refused(folder: Path) -> None:
    """Once a tool has replied, this template drops the first message."""
    template = (folder / "chat_template.jinja").read_text()
    start = "{% for message in messages %}"
    shorter = "{% for message in (messages[1:] if messages[-1].role == 'tool' else messages) %}"
    assert start in template
    (folder / "chat_template.jinja").write_text(template.replace(start, shorter))
    message = refused(folder)
    assert "changes earlier text when a tool reply follows" in message
    assert "history is a prefix of its continuation" in message


def test_the_context_is_found_in_a_nested_text_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": config}))
    assert "the model's context is 256 tokens" in refused(folder, max_tokens_per_episode=300)


class StandIn(ScriptedEngine):
    """An engine with weights of its own, as one in another process has; what it writes is a script."""

    has_own_memory = True

    def __init__(self, folder: Path, *, end_of_turn: int, takes_weights: bool, knows_its_weights: bool):
        self.knows_its_weights, self.remedy = knows_its_weights, "Set engine.settings.dtype"
        super().__init__([[[end_of_turn]]], end_of_turn=end_of_turn)
        self.model, self.takes_weights = load_model(folder, compute=on_cpu(1)), takes_weights
        self.versions: list[int] = []
        self.num_probes, self.is_closed = 0, False

    def refresh(self, weights: Any, policy_version: int) -> None:
        if not self.takes_weights:
            raise FixedWeights("leave engine.settings.urls empty")
        super().refresh(weights, policy_version)
        self.model.load_state_dict(dict(weights.tensors()))
        self.versions.append(policy_version)

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        self.num_probes += 1
        return model_logp(self.model, sequences)

    def close(self) -> None:
        self.is_closed = True


class Measured:
    """Engines over stand-ins. `serves` is the folder of what they start with; None: of the model they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Path):
        self.monkeypatch, self.place = monkeypatch, place

    def engines(self, *, urls: Sequence[str] = (), serves: Path | None = None, takes_weights: bool = True) -> Engines:
        def made(folder: Path, chat: Any, **_: Any) -> Engine:
            return StandIn(
                serves or folder, end_of_turn=chat.end_of_turn, takes_weights=takes_weights, knows_its_weights=not urls
            )

        self.monkeypatch.setattr(load, "load_engine", made)
        vllm = vllm_settings(self.place, mode="server", urls=list(urls))
        self.play = PlaySettings(
            engine=engine_settings("vllm", vllm), sampling=tiny.SAMPLING, seed=0, samples_per_problem=1,
            compute=on_cpu(1),
        )  # fmt: skip
        return Engines(self.play)


URLS = ("http://127.0.0.1:9",)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    return Measured(monkeypatch, tmp_path / "weights")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights alone."""
    place = tmp_path_factory.mktemp("models")
    return tiny.model_folder(place / "one", seed=1), tiny.model_folder(place / "two", seed=2)


def over(engines: Engines, folder: Path) -> Any:
    return engines.over(folder, load_chat(folder), TravelDesk(), tiny.problems(5))


@pytest.mark.slow
def test_a_started_engine_is_probed_once_and_refreshed_for_the_next_model(
    measured: Measured, folders: tuple[Path, Path]
) -> None:
    engines = measured.engines()
    first = over(engines, folders[0])
    assert (first.versions, first.num_probes) == ([], 1)
    assert over(engines, folders[1]) is first
    assert over(engines, folders[0]) is first
    assert (first.versions, first.num_probes) == ([1, 2], 3)
    engines.close()
    assert first.is_closed


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("computed", ["float32", "bfloat16", "auto"])
def test_beside_an_engine_that_rounds_too_a_model_has_the_dtype_of_its_files(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, stored: str, computed: str
) -> None:
    monkeypatch.setattr(load, "stored_dtype", lambda folder: getattr(torch, stored))
    engines = measured.engines()
    engines.settings = engine_settings("vllm", vllm_settings(measured.place, dtype=computed))
    expected = "bfloat16" if stored == "bfloat16" and computed != "float32" else "float32"
    assert engines._dtype_beside_engine(Path("m")) == expected


def test_log_probs_in_chunks_of_positions_are_those_of_one_chunk(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = load_model(folders[0], compute=on_cpu(1)), [[5, 9, 14, 3, 8, 21, 4, 7], [6, 2]]
    whole = model_logp(model, ids)
    assert [len(row) for row in whole] == [7, 1]
    at_once: list[int] = []
    model.lm_head.register_forward_hook(lambda module, given, logits: at_once.append(logits[..., 0].numel()))
    monkeypatch.setattr(architecture, "LOGIT_BYTES", 3 * 4 * model.config.vocab_size)  # 3 positions
    found = model_logp(model, ids)
    assert [found[0], found[1]] == [pytest.approx(row, abs=1e-6) for row in whole]
    assert at_once == [3, 3, 1, 1], "no more logits than those of a chunk"


@pytest.mark.slow
def test_another_tokenizer_needs_another_engine(measured: Measured, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """One ordinary word of the vocabulary is spelt otherwise."""
    other = tiny.model_folder(tmp_path / "m")
    words = json.loads((other / "tokenizer.json").read_text())
    entry = next(entry for entry in reversed(words["model"]["vocab"]) if entry[0].isalpha())
    entry[0] += "x"
    (other / "tokenizer.json").write_text(json.dumps(words))
    engines = measured.engines()
    first, second = over(engines, folders[0]), over(engines, other)
    assert second is not first
    assert first.is_closed and not second.is_closed
    assert (second.versions, second.num_probes) == ([], 1)


@pytest.mark.slow
def test_an_engine_that_came_up_with_other_weights_measures_nothing(
    measured: Measured, folders: tuple[Path, Path]
) -> None:
    one, two = folders
    with pytest.raises(
        ValueError, match=r"one: the engine computes with other weights than these\..*at token \d+"
    ) as e:
        over(measured.engines(serves=two), one)
    assert "Another model would be measured. Set engine.settings.dtype" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_a_server_at_a_url_is_brought_the_first_model_too(measured: Measured, folders: tuple[Path, Path]) -> None:
    one, two = folders
    engine = over(measured.engines(urls=URLS, serves=two), one)
    assert (engine.versions, engine.num_probes) == ([1], 1)


@pytest.mark.slow
def test_a_server_that_takes_no_weights_measures_the_model_it_serves_and_no_other(
    measured: Measured, folders: tuple[Path, Path]
) -> None:
    one, two = folders
    engines = measured.engines(urls=URLS, serves=one, takes_weights=False)
    assert over(engines, one).num_probes == 1
    with pytest.raises(ValueError, match=r"two: .* would be measured\. leave engine\.settings\.urls"):
        over(engines, two)


@pytest.mark.slow
def test_what_a_refreshed_engine_measured_carries_version_0_as_what_a_new_one_did(
    measured: Measured, folders: tuple[Path, Path]
) -> None:
    engines = measured.engines()
    played = [
        sample_episodes(
            folder, TravelDesk(), tiny.problems(5), measured.play, stage="test", label="test",
            engines=engines,
        )
        for folder in folders
    ]  # fmt: skip
    assert over(engines, folders[0]).versions == [1, 2]
    assert played[0] == played[1]
    assert {item.policy_version for item in played[1]} == {0}
    assert {turn.policy_version for item in played[1] for turn in item.turns} == {0}


@pytest.mark.slow
def test_weights_that_are_swapped_while_a_split_is_played_are_noticed_at_its_end_and_its_episodes_not_kept(
    measured: Measured, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = folders
    engines = measured.engines()

    class Swapping(FinishedEpisodes):
        def add(self, trajectory: Trajectory) -> None:
            super().add(trajectory)
            if len(self) == 3:
                live: Any = engines._live
                live.model.load_state_dict(load_model(two, compute=on_cpu(1)).state_dict())

    def sampled(finished: FinishedEpisodes) -> list[Trajectory]:
        return sample_episodes(
            one, TravelDesk(), tiny.problems(5), measured.play, stage="test", label="test",
            engines=engines, finished=finished,
        )  # fmt: skip

    file = tmp_path / "test_best.jsonl"
    with pytest.raises(ValueError, match="the engine's weights changed while it was measured") as caught:
        sampled(Swapping(file))
    assert "\n" not in str(caught.value)
    assert not file.exists()
    assert len(sampled(FinishedEpisodes(file))) == len(FinishedEpisodes(file)) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("products", "is_confirmed"), [("float32", False), ("float16", True)])
def test_an_engine_that_repeats_its_log_probs_within_what_rounded_products_explain_is_confirmed(
    measured: Measured,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    products: str,
    is_confirmed: bool,
) -> None:
    """TensorFloat-32 rounds factors as float16 does: 0.001 nats are a tenth of what is allowed then, and ten times what
    float32 explains.
    """
    engines = measured.engines()
    engines.settings = engines.settings.model_copy(update={"probe_tolerance": "auto"})
    live = over(engines, folders[0])
    monkeypatch.setattr(load, "product_dtype", lambda device: products)
    monkeypatch.setattr(
        live,
        "token_logp",
        lambda sequences: [[logp + 0.001 for logp in row] for row in model_logp(live.model, sequences)],
    )
    if is_confirmed:
        engines.confirm(folders[0])
    else:
        with pytest.raises(ValueError, match="the engine's weights changed while it was measured"):
            engines.confirm(folders[0])
