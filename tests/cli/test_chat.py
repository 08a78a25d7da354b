"""`pcg chat` and `executor.chat`: a conversation with adapters."""

import pytest

import pcg
from pcg.errors import GenerationError
from tests.support.command_line import run

SHORT = {"max_new_tokens": 6, "ignore_eos": True}


def test_a_conversation_switches_adapters(model, adapter):
    lines = ["hello", "/adapter base", "again", "", "/clear", "hello", "/adapter no", "/adapter"]
    result = run(
        *("chat", model, "--adapter", f"loud={adapter}", "--system", "be brief"),
        *("-n", "6", "--ignore-eos"),
        input="\n".join([*lines, "/help", "/quit", "never read"]),
    )
    assert result.exit_code == 0, result.output
    executor = pcg.compile(model)
    executor.add_adapter("loud", adapter)
    begun = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    first = executor.chat(begun, "loud", **SHORT).text
    history = [*begun, {"role": "assistant", "content": first}]
    second = executor.chat([*history, {"role": "user", "content": "again"}], **SHORT).text
    third = executor.chat(begun, **SHORT).text
    assert result.stdout == f"{first}\n{second}\n{third}\n"
    assert "there is no adapter 'no'" in result.stderr
    assert "base, loud; now base" in result.stderr
    assert "/system TEXT" in result.stderr


def test_a_chat_streams_and_takes_variables_of_the_template(model):
    executor = pcg.compile(model)
    executor.tokenizer = None
    with pytest.raises(GenerationError, match=r"set executor\.tokenizer"):
        executor.chat([{"role": "user", "content": "x"}])
    executor.tokenizer = model
    template = "{{ greeting }}{{ messages[0]['content'] }}"
    executor.state.set_tokenizer(executor.tokenizer.with_template(template), is_own=True)
    messages, variables = [{"role": "user", "content": "x"}], {"greeting": "dear "}
    whole = executor.chat(messages, chat_template_kwargs=variables, **SHORT)
    assert whole.text == executor.generate("dear x", **SHORT).text
    chunks = executor.chat(messages, stream=True, chat_template_kwargs=variables, **SHORT)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    with pytest.raises(GenerationError, match="n=2; a chat has one answer"):
        executor.chat(messages, n=2)


def test_commands_take_a_template_and_its_variables(model, tmp_path):
    path = tmp_path / "greeting.jinja"
    path.write_text("{{ greeting }}{{ messages[0]['content'] }}")
    given = ("--chat-template", path, "--chat-template-kwargs", "greeting=dear ", "-n", "6")
    said = pcg.compile(model).generate("dear x", **SHORT).text
    assert said in run("run", model, "--chat", "--prompt", "x", *given, "--ignore-eos").stdout
    assert run("chat", model, *given, "--ignore-eos", input="x\n").stdout == f"{said}\n"
    refused = run("run", model, "--prompt", "x", *given)
    assert refused.exit_code == 2
    assert "add --chat" in refused.stderr


def test_chats_have_the_template_that_the_adapter_was_trained_with(model, tmp_path):
    """It is that of its folder, and is kept where the adapter is saved again."""
    trained = pcg.compile(model)
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    template = "{{ messages[0]['content'] }} the dog{{ messages[1]['content'] if messages[1:] }}"
    told = {"chat_template": template, "max_steps": 1, "progress": False}
    trained.finetune([row], adapter="dog", peft="lora", **told)
    trained.save_adapter("dog", tmp_path / "dog")
    executor = pcg.compile(model, peft={"dog": tmp_path / "dog"})
    executor.save_adapter("dog", tmp_path / "again")
    messages, other = [{"role": "user", "content": "x"}], "{{ messages[0]['content'] }}"
    said = executor.generate("x the dog", "dog", **SHORT).text
    for each in (trained, executor):
        assert each.chat(messages, "dog", **SHORT).text == said
    assert executor.chat(messages, **SHORT).text != executor.generate("x the dog", **SHORT).text
    given = executor.generate("x", "dog", **SHORT).text
    assert executor.chat(messages, "dog", chat_template=other, **SHORT).text == given
    options = ("--adapter", f"dog={tmp_path / 'again'}", "-n", "6", "--ignore-eos")
    for more, text in (((), said), (("--chat-template", other), given)):
        assert run("chat", model, *options, *more, input="x\n").stdout == f"{text}\n"
        assert text in run("run", model, "--chat", "--prompt", "x", *options, *more).stdout
    plain = pcg.compile(model)
    plain.add_adapter("plain")
    plain.save_adapter("plain", tmp_path / "again", overwrite=True)
    assert not (tmp_path / "again" / "chat_template.jinja").exists()
