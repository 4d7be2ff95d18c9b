"""How a GGUF file's ``tokenizer.ggml.pre`` splits text before merging. Plain data, no tokenizer.

Each rule is the list of regular expressions that llama.cpp applies one after another: a match
becomes a fragment, what lies between matches becomes one too, and the next expression sees each
fragment by itself. Where llama.cpp rewrites a model's own expression because its engine lacks
``\\p{Lu}`` or ``(?i:)``, the model's own is used here.
"""

from __future__ import annotations

from dataclasses import dataclass

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_DIGIT = r"\p{N}"
_DIGITS_1_TO_3 = r"\p{N}{1,3}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s+(?!\S)|\s+"
_LINES_SPACES = r"\s*[\r\n]+|" + _SPACES
_LLAMA3 = f"{_CONTRACTION}|{_WORD}|{_DIGITS_1_TO_3}|{_SYMBOLS}|{_LINES_SPACES}"
_QWEN2 = f"{_CONTRACTION}|{_WORD}|{_DIGIT}|{_SYMBOLS}|{_LINES_SPACES}"
_QWEN35 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
) + _LINES_SPACES
_SEED_CODER = f"{_CONTRACTION}|{_WORD}|{_DIGIT}| ?[^\\s\\p{{L}}\\p{{N}}\\r\\n]+|{_LINES_SPACES}"
_MINICPM5 = f"{_CONTRACTION}|{_WORD}|\\p{{N}}+|{_SYMBOLS}|{_LINES_SPACES}"
_JAIS2 = (
    f"{_CONTRACTION}|{_WORD}|{_DIGITS_1_TO_3}|{_SYMBOLS}|\\s*[\\r\\n]+|"
    + "".join(rf"\s{{{run}}}(?!\S)|" for run in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"\s{1,2}(?!\S)|\s{1}"
)
_EXAONE_MOE = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|" + _SPACES
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|" + _SPACES
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(after_word: str, digits: str) -> str:
    """o200k's and Tekken's rule: a word is capitals then small letters."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{head}{_UPPER}*{_LOWER}+{after_word}|{head}{_UPPER}+{_LOWER}*{after_word}|{digits}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LINES_SPACES
    )


_TEKKEN = _cased_words("", _DIGIT)
_O200K = _cased_words(_CONTRACTION + "?", _DIGITS_1_TO_3)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"

# The cased letters of an older Unicode version, as DeepSeek's first tokenizers list them.
_CASED = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}"
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}"
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}"
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}"
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}"
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}"
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}"
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}"
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}"
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)
_MARKS = r"!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}"
_EAST_ASIAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK3 = (
    _DIGITS_1_TO_3,
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _LINES_SPACES,
)


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """``regexes`` in order. ``ignore_merges``: a fragment that is itself a token is not merged.

    ``add_bos`` is what a file means that does not say ``tokenizer.ggml.add_bos_token``.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DIGITS_THEN_GPT2 = PreTokenizerRule((_DIGIT, GPT2))
_LLAMA3_RULE = PreTokenizerRule((_LLAMA3,), ignore_merges=True, add_bos=True)
_NAMES: dict[PreTokenizerRule, str] = {
    PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", _THREE_DIGITS)): "default",
    PreTokenizerRule((GPT2,)): (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat mellum a.x-4.0 exaone4"
    ),
    _DIGITS_THEN_GPT2: ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    _LLAMA3_RULE: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    PreTokenizerRule((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    PreTokenizerRule((_QWEN2,)): (
        "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan grok-2 solar-open kormo f2llmv2"
    ),
    PreTokenizerRule((_QWEN35,)): "qwen35",
    PreTokenizerRule(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            rf"\s?[{_MARKS}]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    PreTokenizerRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT)): (
        "deepseek-coder"
    ),
    PreTokenizerRule(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, _THREE_DIGITS)): "falcon",
    PreTokenizerRule((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    PreTokenizerRule((_BLOOM, _DIGIT)): "viking",
    PreTokenizerRule((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
    PreTokenizerRule((_O200K,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizerRule((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)): "tiny_aya cohere2moe",
    PreTokenizerRule((_SEED_CODER,)): "seed-coder",
    PreTokenizerRule((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    PreTokenizerRule((_EXAONE_MOE,)): "exaone-moe",
    PreTokenizerRule((_JAIS2,)): "jais-2",
    PreTokenizerRule((_DIGITS_1_TO_3, _MINICPM5), ignore_merges=True): "minicpm5",
}
RULES: dict[str, PreTokenizerRule] = {
    name: rule for rule, names in _NAMES.items() for name in names.split()
}
