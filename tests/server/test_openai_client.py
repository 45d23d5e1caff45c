# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash serve` with the demo pair, asked by the real `openai` client: the API works, and with speculation on."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
START_S = 400
QUESTION = [{"role": "user", "content": "Name the four seasons."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Server:
    """A running server; `url` without the API prefix."""

    def __init__(self, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [
            sys.executable,
            "-m",
            "vllm_dflash.cli.app",
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--dtype",
            "float32",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
        ]
        self._process = subprocess.Popen(
            command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=os.environ | {"VLLM_DFLASH": "1"}
        )

    def wait(self):
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"not ready after {START_S} s: {self._log.read_text()[-3000:]}")

    def counter(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        return sum(map(float, found))

    def stop(self):
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests."""
    running = Server(tmp_path_factory.mktemp("server") / "log.txt")
    try:
        running.wait()
        yield running
    finally:
        running.stop()


@pytest.fixture
def client(server):
    """The client, as any user of the OpenAI API has it."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240)


def test_chat_is_answered_with_accepted_drafts(server, client):
    """Breaks when the server runs without speculation, or its drafts are never accepted."""
    before = server.counter("vllm:spec_decode_num_accepted_tokens_total")
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=48, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 8
    accepted = server.counter("vllm:spec_decode_num_accepted_tokens_total") - before
    drafts = server.counter("vllm:spec_decode_num_drafts_total")
    assert accepted >= 5
    assert drafts >= 1


def test_streaming_gives_the_same_text(client):
    """Breaks when several tokens of one step are streamed in the wrong order, twice, or not at all."""
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0)
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0, stream=True)
    chunks = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(chunks) == whole.choices[0].message.content
    assert len(chunks) > 3


def test_logprobs_belong_to_their_tokens(client):
    """Breaks when the log-probabilities of accepted drafts are shifted: greedy tokens must be the most likely ones."""
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert entry.logprob == pytest.approx(max(other.logprob for other in entry.top_logprobs), abs=1e-4)


def test_a_json_schema_holds_with_speculation(client):
    """Breaks when drafts that the grammar forbids are accepted."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent a person. Answer in JSON with name and age."}],
        max_tokens=80,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 99


def test_a_named_tool_is_called(client):
    """Breaks when the answer is no call, or its arguments are no JSON; vLLM's parser does not hold them to the schema."""
    tool = {"type": "function", "function": {"name": "introduce", "description": "Introduce a person.", "parameters": PERSON}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Introduce Ada, who is 36."}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "introduce"}},
        max_tokens=60,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "introduce"
    assert json.loads(call.function.arguments)


def test_the_prompt_is_echoed(client):
    """Breaks when log-probabilities of prompt and answer, which come in other numbers per step, lose their tokens."""
    prompt = "The four seasons are"
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=8, temperature=0)
    (choice,) = answer.choices
    assert choice.text.startswith(prompt)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.token_logprobs) == answer.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_sampling_is_sane(client):
    """Breaks with vLLM's CPU sampler as it is: text at a low temperature is then noise instead of the greedy answer."""
    greedy = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
    cold = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0.01)
    assert cold.choices[0].message.content == greedy.choices[0].message.content


def test_a_wrong_request_is_refused_politely(client):
    """Breaks when a bad request kills the server."""
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=10_000_000)
    assert client.models.list().data[0].id == MODEL


def test_the_example_client(server):
    """Breaks when the example no longer fits the server."""
    example = Path(__file__).parents[2] / "examples" / "openai_client.py"
    done = subprocess.run([sys.executable, str(example), f"{server.url}/v1"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "vllm:spec_decode_num_accepted_tokens_total" in done.stdout
