"""Settings of a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from pydantic import Field, field_validator

from tasks.core.settings import Settings, VariableName


class FrontierSettings(Settings):
    """A model to hold the trained one against, at any OpenAI-compatible endpoint, played on the first `num_problems` of
    test (null: all).

    `api_key_variable` names the variable of ours that holds the key; null where the endpoint wants none. `temperature`
    null leaves it to the endpoint, as some models demand. `max_output_tokens` is of one reply. Prices are per million
    tokens, in any currency; null where they are not known, and so no cost is.
    """

    url: str = Field(pattern=r"^https?://")
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

    @field_validator("url")
    @classmethod
    def _no_query_in_it(cls, url: str) -> str:
        if "?" in url:
            raise ValueError("it holds a query, to which no path can be added; name the variable of a key instead")
        return url
