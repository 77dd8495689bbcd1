"""Conversations -> token ids with the model's own chat template."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or many, as a list of conversations; TypeError for what is neither."""
    if isinstance(messages, list | tuple):
        if all(isinstance(message, dict) for message in messages):
            return [list(messages)]
        if all(isinstance(conversation, list | tuple) for conversation in messages):
            return [list(conversation) for conversation in messages]
    raise TypeError(
        f"messages={messages!r} must be a list of {{'role': 'user', 'content': '…'}}, or a list of such lists; "
        "`generate` takes plain texts"
    )


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    add_generation_prompt: bool = True,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation: `[{"role": "user", "content": "…"}, …]`.

    A content may also be a list of parts, `[{"type": "text", "text": "…"}, …]`; a line break joins them.

    Args:
        add_generation_prompt: end with the header of the assistant's next message.
        template_kwargs: variables of the template (`enable_thinking=False` for Qwen3), or options of `apply_chat_template`.

    Raises:
        ValueError: no template, a variable that the template does not know, or messages that it refuses.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "this model's tokenizer has no chat template; give `generate` a prompt instead, "
            "or set `llm.get_tokenizer().chat_template`"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f"message {number} is {message!r}; write {{'role': 'user', 'content': '…'}}")
    if not messages:
        raise ValueError("the conversation is empty; give at least one message")
    kwargs = template_kwargs or {}
    _check_kwargs(tokenizer, kwargs)
    messages = [_with_text(number, message) for number, message in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _with_text(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """`message` with its parts as one text: most templates can only add texts."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"message {number} has the part {part!r}; only {{'type': 'text', 'text': '…'}} can be read"
            )
    return message | {"content": "\n".join(part["text"] for part in content)}


def _check_kwargs(tokenizer: Any, kwargs: dict[str, Any]) -> None:
    """A misspelt variable would be ignored by the template; name it instead."""
    options = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"conversation", "kwargs"}
    template = kwargs.get("chat_template") or tokenizer.get_chat_template(tools=kwargs.get("tools"))
    variables = set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"{[{%].*?[%}]}", template, re.DOTALL))))
    fixed = {"tokenize", "add_generation_prompt", "return_dict", "return_tensors"}
    for name in kwargs:
        if name in fixed:
            raise ValueError(f"chat_template_kwargs has {name!r}, which this call sets itself; leave it out")
        if name not in options and name not in variables:
            raise ValueError(
                f"the chat template has no variable {name!r}; check its spelling in `tokenizer.chat_template`"
            )
