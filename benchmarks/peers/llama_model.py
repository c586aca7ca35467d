"""llama.cpp running a whole model, for benchmarks/smollm2.py: `llama_model.py MODEL.gguf THREADS CONTEXT`, in the environment `llama-cpp`.

Reads `{"ids": [..], "count": N}` a line, evaluates the ids in one batch, decodes N tokens greedily, and answers with the seconds of both.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import llama_cpp

    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = llama_cpp.Llama(
        path, n_ctx=context, n_batch=context, n_ubatch=context, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    print(json.dumps({"version": llama_cpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        model.reset()
        start = time.perf_counter()
        model.eval(request["ids"])
        token = model.sample(temp=0.0, repeat_penalty=1.0)
        first = time.perf_counter()
        tokens = [token]
        while len(tokens) <= request["count"]:
            model.eval([token])
            token = model.sample(temp=0.0, repeat_penalty=1.0)
            tokens.append(token)
        done = time.perf_counter()
        print(json.dumps({"prefill": first - start, "decode": done - first, "decoded": len(tokens) - 1}), file=answers, flush=True)


if __name__ == "__main__":
    main()
