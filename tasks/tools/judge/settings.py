"""The section `environment.judge` of params: which model, by which rubric, and how far it must agree with people.

Files are the judge's own rubric or in tasks/custom/, the folder DVC watches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator, model_validator

from tasks.core.settings import LocalFolder, Settings, VariableName
from tasks.core.urls import EndpointUrl
from tasks.tools.settings import check_in_process, check_is_custom

OWN_RUBRIC = "tasks/tools/judge/rubric.md"


def _check_custom_file(file: str) -> str:
    check_is_custom(file)
    return file


CustomFile = Annotated[str, AfterValidator(_check_custom_file)]


class AgreementSettings(Settings):
    """How far the judge must agree with people. `labels`: episodes that they judged (`labels.py`); `evidence`: what
    `python -m tasks judge-check` measured on them. The judge is refused unless the interval of its agreement, at this
    `confidence`, begins at `min_agreement` or above and Cohen's kappa is at least `min_kappa`.
    """

    labels: CustomFile
    evidence: CustomFile
    confidence: float = Field(gt=0, lt=1)
    min_agreement: float = Field(ge=0, le=1)
    min_kappa: float = Field(ge=-1, le=1)


class JudgeSettings(Settings):
    """A model at an OpenAI-compatible endpoint, or (`url` null) a folder on this machine, in process, which reads
    neither `max_retries` nor `max_concurrent_requests` nor `timeout_seconds`. `decides`: an episode succeeds only if
    the judge says so too; else its opinion is left in the verdict's details alone.

    `structured`: the endpoint constrains answers to the JSON schema; false for one that cannot, such as
    `transformers serve`, whose answers are only checked. `show_reference`: the judge reads the problem's solution.
    `max_attempts`: requests until a vote is a valid answer. `max_retries`: of one request that fails.
    `max_characters`: of the judged episode; beyond, its longest texts are cut in their middle.

    `agreement` is null for a judge that nobody measured; the lineage says so.
    """

    url: EndpointUrl | None
    model: str = Field(min_length=1)
    api_key_variable: VariableName | None
    decides: bool
    rubric: str
    show_reference: bool
    structured: bool
    num_votes: int = Field(ge=1, le=99)
    temperature: float = Field(ge=0)
    seed: int = Field(ge=0)
    max_output_tokens: int = Field(ge=1)
    max_characters: int = Field(ge=1000)
    max_attempts: int = Field(ge=1)
    max_retries: int = Field(ge=0)
    max_concurrent_requests: int = Field(ge=1)
    timeout_seconds: float = Field(gt=0)
    cache_folder: LocalFolder
    agreement: AgreementSettings | None

    @property
    def rubric_file(self) -> Path:
        return Path(__file__).with_name("rubric.md") if self.rubric == OWN_RUBRIC else Path(self.rubric)

    @field_validator("rubric")
    @classmethod
    def _check_rubric_is_watched(cls, rubric: str) -> str:
        return rubric if rubric == OWN_RUBRIC else _check_custom_file(rubric)

    @model_validator(mode="after")
    def _check_model_in_process(self) -> JudgeSettings:
        if self.url is not None:
            return self
        check_in_process(self.model, api_key_variable=self.api_key_variable)
        if not self.structured:
            raise ValueError(
                "structured is false and url null, but a model in this process always answers by the schema. Set "
                "structured: true, or url to that of the endpoint"
            )
        return self

    @model_validator(mode="after")
    def _check_votes(self) -> JudgeSettings:
        if self.num_votes % 2 == 0:
            raise ValueError(f"num_votes is {self.num_votes}, so votes could be tied. Use an odd number")
        if self.num_votes > 1 and self.temperature == 0:
            raise ValueError(
                f"num_votes is {self.num_votes} and temperature 0, so every vote would be the same answer, paid for "
                f"{self.num_votes} times. Set num_votes: 1, or a temperature such as 0.7"
            )
        return self
