"""Settings of bfcl: which problems of the benchmark."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from pydantic import Field, model_validator

from tasks.core.settings import Settings

BFCLCategory = Literal["multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context"]
Turns = Literal["first", "all"]
BFCL_CATEGORIES = get_args(BFCLCategory)


class BFCLSettings(Settings):
    """`turns`: the `first` user request of each conversation, or `all`."""

    judges_each_turn: ClassVar[bool] = True

    categories: list[BFCLCategory] = Field(min_length=1)
    turns: Turns

    @model_validator(mode="after")
    def _refuse_repeated_categories(self) -> BFCLSettings:
        if len(set(self.categories)) < len(self.categories):
            raise ValueError("categories names one twice, so its problems would be in the data twice; name each once")
        return self


SETTINGS = BFCLSettings
