"""Text in and out of token ids: tokenizers, chat templates, detokenizing, stop strings.

The engine sees ids only; nothing here knows of sequences, blocks or HTTP.
"""
