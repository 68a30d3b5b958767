"""Every format that a template may be found to write; the recipe is for what is left."""

from __future__ import annotations

from tasks.chat.formats.base import CallFormat
from tasks.chat.formats.glm_xml import GLM_XML, GLM_XML_ONE_LINE
from tasks.chat.formats.harmony import HARMONY
from tasks.chat.formats.hermes import HERMES
from tasks.chat.formats.llama import LLAMA
from tasks.chat.formats.mistral import MISTRAL, MISTRAL_LIST
from tasks.chat.formats.pythonic import LFM_PYTHONIC, PYTHONIC
from tasks.chat.formats.qwen_xml import QWEN_XML, QWEN_XML_PYTHON

FORMATS: tuple[CallFormat, ...] = (
    HERMES, LLAMA, QWEN_XML, QWEN_XML_PYTHON, GLM_XML, GLM_XML_ONE_LINE, MISTRAL, MISTRAL_LIST, PYTHONIC, LFM_PYTHONIC,
    HARMONY,
)  # fmt: skip
