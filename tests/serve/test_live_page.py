"""The page of a server: it holds nothing by itself, and a browser shows what its key may see."""

import base64
import hashlib
import re

import pytest

from pcg.serve.status import live_page
from tests.support import serving
from tests.support.browser import open_tab

HOSTILE = "<img src=x onerror=document.title=1>&amp;"
"""A name that would run a script where it is taken for HTML."""


def test_it_is_served_without_a_key_and_says_nothing_of_the_server(service):
    reply = serving.ask(service, "GET", "/", {})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.text == live_page()
    for word in (serving.MODEL, "lora-0", "0.1.0"):
        assert word not in reply.text


def test_it_needs_no_other_file_and_only_its_own_script_runs(service):
    reply = serving.ask(service, "GET", "/", {})
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|<link|<img", reply.text)
    assert not re.search(r"\bon\w+=|style=|innerHTML|insertAdjacentHTML|eval\(", reply.text)
    policy = dict(
        part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("connect-src") == "'self'"
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert set(policy.values()) == {"'none'"}
    assert reply.headers["x-frame-options"] == "DENY"


# --------------------------------------------------------------------------------------- a browser


@pytest.fixture(scope="module")
def served():
    with serving.on_a_port(served_model_name=(HOSTILE,), ttft_slo_ms=60_000.0) as found:
        yield found


@pytest.fixture
def tab(served, tmp_path):
    with open_tab(tmp_path / "profile") as found:
        found.show(390, 800)
        found.open(f"{served.url}/")
        yield found


def enter(tab, key):
    tab.run(
        f"document.getElementById('key').value = {key!r};"
        "document.querySelector('#enter button').click()"
    )


def seen(tab):
    """The text that the page shows."""
    found = tab.run("document.body.innerText")
    assert isinstance(found, str)
    return found


def overhanging(tab):
    """What reaches beyond the window and is in no box that scrolls."""
    found = tab.run(
        "[...document.querySelectorAll('body *')].filter((one) => !one.closest('.scroll, nav, svg')"
        " && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"
    )
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert isinstance(found, list)
    return found


def test_it_shows_the_server_to_who_has_a_key(tab, served):
    assert "API key" in seen(tab)
    assert "running requests" not in seen(tab)
    assert overhanging(tab) == []
    enter(tab, "wrong-key-of-mine")
    tab.until("document.querySelector('.said').textContent.includes('Incorrect API key')")
    assert tab.run("sessionStorage.length") == 0
    tab.errors.clear()  # the browser notes the 401

    enter(tab, serving.KEY)
    tab.until("!document.querySelector('.live').hidden")
    words = seen(tab)
    assert tab.run("document.querySelector('h1').textContent") == HOSTILE
    for part in ("running requests", "lora-0", "to the first token", "60.0 s", "takes requests"):
        assert part in words
    for is_dark in (False, True):
        for width in (390, 1200):
            tab.show(width, 800, is_dark=is_dark)
            assert overhanging(tab) == []
    colors = "[getComputedStyle(document.body).backgroundColor, innerWidth]"
    dark = tab.run(colors)
    tab.show(1200, 800)
    assert tab.run(colors) != dark
    assert tab.run("sessionStorage.length + localStorage.length + document.cookie.length") == 1
    tab.run("document.getElementById('leave').click()")
    assert "lora-0" not in seen(tab)
    assert tab.run("sessionStorage.length") == 0
    assert tab.errors == []


def test_an_adapter_can_be_tried(tab, served):
    enter(tab, serving.KEY)
    tab.until("!document.querySelector('.live').hidden")
    tab.run(
        "const form = document.getElementById('ask').elements; form.model.value = 'lora-0';"
        "form.kind.value = 'completion'; form.prompt.value = 'def'; form.tokens.value = 24;"
        "form.temperature.value = 0; document.getElementById('send').click()"
    )
    tab.until("document.getElementById('took').textContent.includes('tokens;')")
    with served.client() as client:
        body = {"model": "lora-0", "prompt": "def", "max_tokens": 24, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert tab.run("document.getElementById('answer').textContent") == answer
    tab.until("document.querySelector('#span').textContent.includes('request')")
    tab.run("document.getElementById('prompt').value = 'a'.repeat(4000)")
    tab.run("document.getElementById('send').click()")
    tab.until("document.getElementById('answer').className === 'bad'")
    assert "maximum context length" in seen(tab)
    assert [one for one in tab.errors if "400" not in one] == []


def test_a_server_that_has_gone_is_told(tmp_path):
    with open_tab(tmp_path / "profile") as tab:
        with serving.on_a_port() as served:
            tab.open(f"{served.url}/")
            enter(tab, serving.KEY)
            tab.until("!document.querySelector('.live').hidden")
        tab.until("document.getElementById('state').textContent.includes('does not answer')")
        assert tab.run("document.getElementById('dot').className") == "bad"
