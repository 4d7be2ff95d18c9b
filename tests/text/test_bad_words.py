"""Words that must not come out, as token sequences."""

from __future__ import annotations

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.text.bad_words import with_bad_word_tokens
from octavo.text.tokenizer import TokenizerError
