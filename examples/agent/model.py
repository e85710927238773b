"""Where proposals come from: a script, or an endpoint that speaks OpenAI's API."""

import concurrent.futures
import os
import pathlib
import re

SCRIPTED = pathlib.Path(__file__).parent / "scripted"
FAILED = re.compile(r"^(?:FAIL|ERROR): (\w+)", re.MULTILINE)
SYSTEM = (
    "You mend programs. Answer with one sentence, and one unified diff (paths a/… and b/…) in a "
    "block that begins with ```diff. Do not touch the tests."
)


class ScriptedModel:
    """Answers from `scripted/TEST/`, of the first TEST there that fails in what it is asked.

    It asks nobody, so the example needs no network and no key. Of its answers some are wrong on
    purpose: as a model's are.
    """

    def propose(self, prompt, count):
        """Up to `count` answers; none if it knows nothing about the tests that fail."""
        failing = set(FAILED.findall(prompt))
        for directory in sorted(SCRIPTED.iterdir()):
            if directory.name in failing:
                answers = sorted(directory.glob("*.md"))[:count]
                return [answer.read_text() for answer in answers]
        return []


class Endpoint:
    """Any server with OpenAI's chat completions: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL."""

    def __init__(self, model):
        import openai  # Only who uses it needs it.

        self.model = model
        self.client = openai.OpenAI(timeout=120)

    def propose(self, prompt, count):
        """`count` answers, asked for at once."""
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            return list(threads.map(lambda _: self.ask(prompt), range(count)))

    def ask(self, prompt):
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": prompt},
        ]
        answer = self.client.chat.completions.create(model=self.model, messages=messages)
        return answer.choices[0].message.content or ""


def configured():
    """The endpoint that the environment names, or else the script."""
    model = os.environ.get("OPENAI_MODEL")
    if model:
        return Endpoint(model)
    if os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_KEY"):
        raise SystemExit("OPENAI_MODEL is missing: name the model that the endpoint is to use.")
    return ScriptedModel()
