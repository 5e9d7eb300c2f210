"""Run many commands of the portable runtime in one process, for tests that compare thousands of them.

    driver.py RUNTIME < requests > answers

A request is one line of JSON: the command line, the text on standard input, and the path that the runtime is to take
for its own (the workspace's copy, so that it does the work itself).  An answer is one line with status, out and err.
"""
import importlib.util
import io
import json
import sys
import traceback


def load(path):
    spec = importlib.util.spec_from_file_location("echoes_vault", path)
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    return module


def answer(module, request):
    module.__file__ = request["file"]
    sys.stdin = io.TextIOWrapper(io.BytesIO(request["stdin"].encode("utf-8")))
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    try:
        status = module.main(request["words"])
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
        status = 1
    texts = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))
    return {"status": status, "out": texts[0], "err": texts[1]}


def main():
    requests, answers = sys.stdin, sys.stdout
    module = load(sys.argv[1])
    for line in requests:
        result = answer(module, json.loads(line))
        answers.write(json.dumps(result) + "\n")
        answers.flush()


main()
