"""A conversation reads as transformers writes it, and a template's errors are the client's."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import chat
from headrace.engine.chat import ChatTemplate
from headrace.engine.models import resolve
from headrace.errors import Refused

SYSTEM = {"role": "system", "content": " Be brief. "}
ASK = {"role": "user", "content": 'Wie heißt <du> & "wer" bist du?\n'}
REPLY = {"role": "assistant", "content": "Ich bin 中 \N{EARTH GLOBE EUROPE-AFRICA}."}
CHATS = ([ASK], [SYSTEM, ASK], [ASK, REPLY, ASK], [SYSTEM, ASK, REPLY, ASK])

HEADERS = """
{{- bos_token }}
{%- set loop_messages = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\n' + strftime_now('%Y') + '\\n' + system_message + '<|eot|>' }}
{%- for message in loop_messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\\n' }}{%- endif -%}
"""
TAGGED = """{% if tools %}TOOLS{% endif %}
{%- set ns = namespace(last=-1) %}
{% for message in messages %}
{% if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% for message in messages %}
    {% if message.content == '' %}{% continue %}{% endif %}
<|{{ message.role }}|>{{ ns.last }}
    {% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% else %}
{{ message | tojson }}{{ message.content | tojson(indent=2) }}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
{{ unheard_of }}{{ dict(a=1).a }}"""
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def written(directory: Path, template: str | list[dict[str, str]] | None, **more: Any) -> Path:
    """A model directory with a template as one setting among others."""
    config = {**TOKENS, **more} | ({} if template is None else {"chat_template": template})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def by_transformers(template: str, messages: list[dict[str, str]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=True,
        bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    return str(rendered[0])


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("template", [HEADERS, TURNS, TAGGED])
def test_templates_of_all_styles_read_as_transformers_writes_them(
    template: str, messages: list[dict[str, str]], tmp_path: Path
) -> None:
    made = ChatTemplate(written(tmp_path, template))
    assert made.has_template
    if template is TURNS and messages[0] is SYSTEM:
        with pytest.raises(Refused, match="System role not supported") as refused:
            made.render(messages)
        assert refused.value.field == "messages"
        return
    assert made.render(messages) == by_transformers(template, messages)


@pytest.mark.real_model
@pytest.mark.parametrize("messages", CHATS)
def test_a_real_model_s_prompt_is_that_of_its_tokenizer(messages: list[dict[str, str]]) -> None:
    try:
        directory = resolve("smollm2-135m")
    except Refused as exc:
        pytest.skip(str(exc))
    from transformers import AutoTokenizer

    from headrace.engine.text import ModelText

    theirs = AutoTokenizer.from_pretrained(directory)
    text = ChatTemplate(directory).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    told = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert ModelText(directory).encode(text, add_special=False) == told["input_ids"]


def test_a_file_of_its_own_goes_before_the_configuration(tmp_path: Path) -> None:
    written(tmp_path, "from the configuration")
    assert ChatTemplate(tmp_path).render([ASK]) == "from the configuration"
    (tmp_path / "chat_template.jinja").write_text("ä{{ add_generation_prompt }}{{ eos_token }}")
    assert ChatTemplate(tmp_path).render([ASK]) == "äTrue</s>"
    assert ChatTemplate(tmp_path).render([ASK], add_generation_prompt=False) == "äFalse</s>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    assert ChatTemplate(written(tmp_path, named)).render([ASK]) == "plain"
    assert not ChatTemplate(written(tmp_path, named[:1])).has_template


def test_special_tokens_are_found_where_a_model_tells_them(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "old", "sep_token": "<sep>", "additional_special_tokens": ["x"]})
    )
    written(tmp_path, "{{ bos_token }}{{ sep_token }}{{ add_bos_token }}", add_bos_token=True)
    assert ChatTemplate(tmp_path).render([ASK]) == "<s><sep>"


def test_a_model_without_a_template_points_to_completions(tmp_path: Path) -> None:
    for made in (ChatTemplate(tmp_path, "tiny"), ChatTemplate(written(tmp_path, None), "tiny")):
        assert not made.has_template
        with pytest.raises(Refused, match="model tiny has no chat template; use /v1/completions"):
            made.render([ASK])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages[7].role }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages | nonsense_of | list }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ range(10 ** 9) }}",
        "{{ strftime_now('%Y' * 1000) }}",
        "{{ raise_exception('') }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(template: str, tmp_path: Path) -> None:
    written(tmp_path, template)
    with pytest.raises(Refused) as refused:
        ChatTemplate(tmp_path, "tiny").render([ASK])
    assert "tiny" in str(refused.value)


def test_a_template_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="chat template of tiny is no Jinja: line 2"):
        ChatTemplate(written(tmp_path, "\n{% if %}"), "tiny")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(Refused, match="no JSON"):
        ChatTemplate(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert not ChatTemplate(tmp_path).has_template


def test_a_prompt_has_an_end_in_length_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ChatTemplate(written(tmp_path, "{% for one in range(1000) %}{{ one }},{% endfor %}"))
    assert len(made.render([ASK])) == 3890
    with monkeypatch.context() as less:
        less.setattr(chat, "MAX_RENDERED", 3889)
        with pytest.raises(Refused, match="over 3889 characters"):
            made.render([ASK])
    monkeypatch.setattr(chat, "MAX_RENDER_S", -1.0)  # which is over before it begins
    with pytest.raises(Refused, match="takes over -1 s"):
        made.render([ASK])


def test_without_jinja_a_model_that_needs_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert not ChatTemplate(tmp_path).has_template
    with pytest.raises(Refused, match="needs jinja2"):
        ChatTemplate(written(tmp_path, "text"), "tiny")
