"""A simulated user played in this process by a frozen model, such as the base in `artifacts/assess/base_model`.

One message at a time, in one thread of its own: for small models and tests of the path. A large user belongs behind an
endpoint, which batches. The folder is read when the first user speaks, since `assess` may have to make it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tasks.chat.format import break_up, every_added_token
from tasks.models.folders import load_model, load_tokenizer, stored_dtype
from tasks.models.settings import on_cpu
from tasks.models.torch_setup import prepared_for
from tasks.rollouts.seeds import stream_seed
from tasks.tools.base import EnvironmentFault
from tasks.tools.user.played import Message
from tasks.tools.user.settings import UserModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FrozenSpeaker:
    """A Speaker whose words are a function of the weights, the messages and the seed."""

    def __init__(self, settings: UserModelSettings):
        self.settings, self.folder = settings, Path(settings.model)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="user")

    async def say(self, messages: Sequence[Message], *, seed: str) -> str:
        given = list(messages)
        return await asyncio.get_running_loop().run_in_executor(self.thread, lambda: self._write(given, seed))

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _model(self) -> PreTrainedModel:
        """Computed as the run computes; on any device where the run has no model of its own."""
        import torch

        compute = prepared_for() or on_cpu(torch.get_num_threads()).model_copy(update={"device": "auto"})
        dtype = "bfloat16" if stored_dtype(self.folder) == torch.bfloat16 else "float32"
        return load_model(self.folder, compute=compute, dtype=dtype).eval()  # type: ignore[arg-type]

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.folder)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return every_added_token(self._tokenizer)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Contents are data: a control token spelt out in one is broken up, or the agent could forge a message."""
        safe = [{**message, "content": break_up(message["content"], self._control)} for message in messages]
        rendered = self._tokenizer.apply_chat_template(safe, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _write(self, messages: list[Message], seed: str) -> str:
        """Plain sampling with a generator of its own: no other stream of random numbers moves."""
        import torch

        tokenizer, settings = self._tokenizer, self.settings
        ids = self.prompt_ids(messages)
        limit = self._model.config.max_position_embeddings
        room = limit - len(ids)
        if room < 1:
            self._refuse(messages, num_tokens=len(ids), limit=limit)
        draw = torch.Generator().manual_seed(stream_seed(0, seed))
        written: list[int] = []
        ends = {tokenizer.eos_token_id}
        cache, new = None, ids
        with torch.no_grad():
            while len(written) < min(settings.max_output_tokens, room):
                step = torch.tensor([new], device=self._model.device)
                out = self._model(input_ids=step, past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, out.logits[0, -1].float().cpu()
                token = int(logits.argmax()) if not settings.temperature else _draw(logits / settings.temperature, draw)
                if token in ends:
                    break
                written.append(token)
                new = [token]
        return str(tokenizer.decode(written, skip_special_tokens=True))

    def _refuse(self, messages: Sequence[Message], *, num_tokens: int, limit: int) -> NoReturn:
        """How long a conversation gets is up to the agent, so it costs the episode; rules that never fit cost the
        run.
        """
        if any(message["role"] == "assistant" for message in messages):
            raise EnvironmentFault(
                f"the conversation has {num_tokens} tokens and it reads at most {limit}", tool="user"
            )
        raise ValueError(
            f"environment.user.model: {self.settings.model} reads at most {limit} tokens and what its user knows has "
            f"{num_tokens}, so it cannot speak. Use a model with a longer context."
        )


def _draw(logits: Any, generator: Any) -> int:
    import torch

    return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))
