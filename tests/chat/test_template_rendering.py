"""Chat templates: what Hugging Face renders, inside a sandbox, within a time."""

import time

import pytest

from megatron_agentrl.chat.template import ChatTemplate, TemplateError, template_messages


def test_json_in_templates_is_neither_sorted_nor_escaped():
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"lo":2,"hi":"<é>"}'}}]}
    assert ChatTemplate(source).render(template_messages([message])) == '{"lo": 2, "hi": "<é>"}'


def test_arguments_that_are_no_json_object_reach_the_template_as_text():
    for text in ('{"lo": ', "[1]", "3"):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
        assert template_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == text


def test_the_features_of_hugging_face_templates_work():
    source = (
        "{%- for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"
    )
    template = ChatTemplate(source, {"eos_token": "<e>"})
    assert template.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b<e>"


def test_a_templates_refusal_is_told_in_its_words():
    with pytest.raises(TemplateError, match="refuses these messages: no system"):
        ChatTemplate("{{ raise_exception('no system') }}").render([])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_an_endless_template_is_stopped(source):
    started = time.monotonic()
    with pytest.raises(TemplateError, match="ran longer than 0.2 s"):
        ChatTemplate(source, limit=0.2).render([])
    assert time.monotonic() - started < 5


def test_a_pause_of_the_machine_does_not_count_against_the_template():
    source = "{% for m in messages %}{{ pause() or m.content }}{% endfor %}"
    assert (
        ChatTemplate(source, limit=0.2).render([{"content": "a"}, {"content": "b"}], pause=lambda: time.sleep(0.25))
        == "ab"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 10 ** 10000000000 }}",
        "{% set x = messages[0].update({'role': 'system'}) %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_and_a_folder_without_one_say_so(tmp_path):
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% for %}")
    with pytest.raises(TemplateError, match="has no chat template; add chat_template.jinja"):
        ChatTemplate.from_folder(tmp_path)


def test_chat_template_jinja_wins_over_the_config_and_special_tokens_come_from_it(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "old", "bos_token": {"content": "<s>"}, "add_bos_token": true}'
    )
    assert ChatTemplate.from_folder(tmp_path).render([]) == "old"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new")
    assert ChatTemplate.from_folder(tmp_path).render([]) == "<s>new"
