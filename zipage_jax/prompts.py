"""The forms in which prompts are given -> token ids. Errors name the value and the forms that work."""

import numbers
from collections.abc import Iterable
from typing import Any

FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': [...]}"


def as_list(prompts: Any) -> list:
    """One prompt or many, as a list of prompts; TypeError for what is neither."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"{prompts!r} is no prompt; give {FORMS}, or a list of these")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], numbers.Integral) else prompts


def prompt_text(prompt: Any) -> str | None:
    """The text of a prompt that has one."""
    return prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None


def token_ids(prompt: Any, get_tokenizer) -> list[int]:
    """Token ids of one prompt; `get_tokenizer()` is called for a text. TypeError or ValueError names what is wrong."""
    if isinstance(prompt, dict):
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"}, key=str)
        if unknown:
            raise ValueError(f"unknown key(s) {unknown}; known: ['prompt', 'prompt_token_ids']")
        if "prompt_token_ids" in prompt:
            return _checked_ids(prompt["prompt_token_ids"])
        prompt = prompt.get("prompt", "")
        if not isinstance(prompt, str):
            raise TypeError(f"{prompt!r} is no text; give {FORMS}")
    if isinstance(prompt, str):
        prompt.encode()  # names a lone surrogate, which the tokenizer would not
        return get_tokenizer()(prompt)["input_ids"]
    return _checked_ids(prompt)


def _checked_ids(ids: Any) -> list[int]:
    if isinstance(ids, str | bytes | dict) or not isinstance(ids, Iterable):
        raise TypeError(f"{ids!r} is no list of token ids; give {FORMS}")
    ids = list(ids)
    for token in ids:
        if not isinstance(token, numbers.Integral) or isinstance(token, bool):
            raise TypeError(f"token id {token!r} is no integer; give {FORMS}")
    return [int(token) for token in ids]
