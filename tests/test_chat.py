"""Chat templates: rendering, template variables, and errors that name the fix."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zipage_jax.chat import render_chat

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE)


def test_rendering(tokenizer):
    messages = [{"role": "user", "content": "Hi ü"}]
    ids = render_chat(tokenizer, messages)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi ü<|im_end|><|im_start|>assistant\n"
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(render_chat(tokenizer, messages, False)) == "<|im_start|>user\nHi ü<|im_end|>"


def test_parts_of_a_content_are_one_text(tokenizer):
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    whole = render_chat(tokenizer, [{"role": "user", "content": "Hi\nthere"}])
    assert render_chat(tokenizer, [{"role": "user", "content": parts}]) == whole


def test_template_variables(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    with_thoughts = render_chat(tokenizer, messages, True, {"enable_thinking": True})
    assert tokenizer.decode(render_chat(tokenizer, messages, True, {"enable_thinking": False})).endswith(
        "<think></think>"
    )
    assert with_thoughts == render_chat(tokenizer, messages)
    other = render_chat(tokenizer, messages, True, {"chat_template": "{{ messages[0].content }}!"})
    assert tokenizer.decode(other) == "Hi!"


@pytest.mark.parametrize(
    ("messages", "kwargs", "says"),
    [
        ([], {}, "at least one message"),
        (["hello"], {}, "message 0 is 'hello'; write"),
        ([{"content": "Hi"}], {}, "message 0"),
        ([{"role": "robot", "content": "Hi"}], {}, "refuses these messages: no robots"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            {},
            "message 0 has the part .*image",
        ),
        ([{"role": "user", "content": ["Hi"]}], {}, "message 0 has the part 'Hi'"),
        ([{"role": "user", "content": "Hi"}], {"enable_thinkng": False}, "no variable 'enable_thinkng'"),
        ([{"role": "user", "content": "Hi"}], {"tokenize": False}, "sets itself"),
    ],
)
def test_errors(tokenizer, messages, kwargs, says):
    with pytest.raises(ValueError, match=says):
        render_chat(tokenizer, messages, True, kwargs)


def test_no_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template; give `generate` a prompt"):
        render_chat(tokenizer, [{"role": "user", "content": "Hi"}])
