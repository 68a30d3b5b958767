"""A frozen model in this process that is asked beside the policy, as a judge or a user; such as the base model.

One answer at a time, in one thread of its own: for small models and tests of the path. A large one belongs behind an
endpoint, which batches. Tokenizer and chat template are read at once, so that a model that cannot be asked is refused
before the first episode; weights are read at the first answer. A model that thinks is given an empty thought: its limit
on tokens is for what it says.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tasks.chat.format import load_chat
from tasks.chat.thinking import HARMONY
from tasks.core.seeds import stream_seed
from tasks.models.folders import folder_hash, load_model, stored_dtype
from tasks.models.settings import on_cpu
from tasks.models.torch_setup import prepared_for

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Message = dict[str, str]
Answer = TypeVar("Answer")


class TooLong(Exception):
    """The messages leave no room for an answer: `num_tokens` of the `limit` that the model reads."""

    def __init__(self, num_tokens: int, limit: int):
        super().__init__(f"{num_tokens} tokens of {limit}")
        self.num_tokens, self.limit = num_tokens, limit


class FrozenModel:
    """Answers that are a function of the weights, the messages and the seed. `setting` names its section in messages.

    `end_ids`: the ids that end an answer: the chat's, and every other special token but the marks of a thought.
    """

    def __init__(self, folder: Path, *, temperature: float, setting: str):
        self.folder, self.temperature, self.setting = _require_folder(folder, setting), temperature, setting
        self.chat = load_chat(folder)
        if self.chat.thinking == HARMONY:
            raise ValueError(
                f"{setting}: {folder} writes its answers in channels, which a model in this process cannot be asked "
                f"in. Serve it at an endpoint and set url."
            )
        marks = self.chat.thinking
        written = () if marks is None else (*self.chat.encode(marks.opening), *self.chat.encode(marks.closing))
        self.end_ids = {*self.chat.end_ids, *self.chat.special_ids}.difference(written)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=setting)

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """In the model's thread, after what was asked before."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def begin(self, messages: Sequence[Message], *, seed: str | int, reserved: str = "") -> Draft:
        """An answer to the messages, with room for the text `reserved` beside what is written. TooLong where there is
        none.
        """
        ids = self.prompt_ids(messages)
        limit = int(self._model.config.get_text_config().max_position_embeddings)
        room = limit - len(ids) - len(self.chat.encode(reserved))
        if room < 1:
            raise TooLong(limit - room, limit)
        return Draft(self, ids, room=room, seed=stream_seed(0, seed))

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Of the rules (a system message), what was asked first, and what follows; then an empty thought, if the model
        thinks. Contents are data: a control token spelt out in one is broken up, or the agent could forge a message.
        """
        rules, asked, *later = messages
        opening, _ = self.chat.opening(asked["content"], [], rules["content"])
        safe = [{**message, "content": self.chat.as_data(message["content"])} for message in later]
        empty_thought, _ = self.chat.written_ids("")
        return self.chat.encode(self.chat.template.render([*opening, *safe], continues=True)) + empty_thought

    @cached_property
    def _model(self) -> PreTrainedModel:
        """Computed as the run computes; on any device where the run has no model of its own."""
        import torch

        compute = prepared_for() or on_cpu(torch.get_num_threads()).model_copy(update={"device": "auto"})
        dtype = "bfloat16" if stored_dtype(self.folder) == torch.bfloat16 else "float32"
        return load_model(self.folder, compute=compute, dtype=dtype).eval()  # type: ignore[arg-type]


def hash_weights(folder: Path, *, setting: str) -> str:
    """What identifies the model in descriptions. ValueError where the folder does not exist."""
    return folder_hash(_require_folder(folder, setting))


def _require_folder(folder: Path, setting: str) -> Path:
    if not folder.is_dir():
        raise ValueError(
            f"{setting}: url is null, and model {folder} is no folder, so there is no model to ask. Name one that is "
            f"there before the first stage, such as the folder of model.path, or set url."
        )
    return folder


class Draft:
    """An answer under way: `text` so far is sampled, added or chosen. Plain sampling with a generator of its own: no
    other stream of random numbers moves.
    """

    def __init__(self, source: FrozenModel, ids: list[int], *, room: int, seed: int):
        import torch

        self.source, self.room, self.text = source, room, ""
        self._unread, self._cache = ids, None
        self._random = torch.Generator().manual_seed(seed)

    def write(self, *, max_tokens: int, ends_before: re.Pattern[str] | None = None) -> bool:
        """Until the model ends its answer, or before the first token in which `ends_before` is found; False where
        `max_tokens` or its context cut it.
        """
        chat, written, is_whole = self.source.chat, list[int](), False
        while len(written) < min(max_tokens, self.room):
            token = self._draw(self._logits())
            if token in self.source.end_ids or (ends_before and ends_before.search(chat.decode([token]))):
                is_whole = True
                break
            written.append(token)
            self._unread.append(token)
        self.text += chat.decode(written)
        return is_whole

    def add(self, text: str) -> None:
        """As if the model had written it."""
        self._unread += self.source.chat.encode(text)
        self.text += text

    def choose(self, choices: Sequence[str]) -> None:
        """One of these texts, none of which begins another, token by token: by the model's probabilities among what can
        still become one of them.
        """
        left, place = {text: self.source.chat.encode(text) for text in choices}, 0
        while len(left) > 1:
            allowed = sorted({ids[place] for ids in left.values()})
            token = allowed[0] if len(allowed) == 1 else allowed[self._draw(self._logits()[allowed])]
            left = {text: ids for text, ids in left.items() if ids[place] == token}
            self._unread.append(token)
            place += 1
        ((text, ids),) = left.items()
        self._unread += ids[place:]
        self.text += text

    def _logits(self) -> Tensor:
        """Of the next token, after reading what it has not read."""
        import torch

        model = self.source._model
        with torch.no_grad():
            step = torch.tensor([self._unread], device=model.device)
            out = model(input_ids=step, past_key_values=self._cache, use_cache=True)
        self._cache, self._unread = out.past_key_values, []
        logits: Tensor = out.logits[0, -1].float().cpu()
        return logits

    def _draw(self, logits: Tensor) -> int:
        import torch

        temperature = self.source.temperature
        if not temperature:
            return int(logits.argmax())
        return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=self._random))
