"""Settings of a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from pydantic import Field

from tasks.core.settings import Settings, VariableName
from tasks.core.urls import EndpointUrl


class FrontierSettings(Settings):
    """A baseline model at an OpenAI-compatible endpoint, played on the first `num_problems` of test (null: all).

    `api_key_variable` names the environment variable with the key (null: no key). `temperature` null leaves it to the
    endpoint, as some models require. `max_output_tokens` is per reply. Prices are per million tokens; null gives no
    cost.
    """

    url: EndpointUrl
    model: str = Field(min_length=1)
    api_key_variable: VariableName | None
    temperature: float | None = Field(ge=0)
    max_output_tokens: int = Field(ge=1)
    max_concurrent_episodes: int = Field(ge=1)
    max_retries: int = Field(ge=0)
    timeout_seconds: float = Field(gt=0)
    price_per_million_input_tokens: float | None = Field(ge=0)
    price_per_million_output_tokens: float | None = Field(ge=0)
    samples_per_problem: int = Field(ge=1)
    num_problems: int | None = Field(ge=1)
