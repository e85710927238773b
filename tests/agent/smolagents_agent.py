"""An agent of smolagents, as PyPI has it, whose code runs in sandboxes of a node that serves
examples/code-interpreter as `code-interpreter-v1`. The model is a script."""

from smolagents import ChatMessage, CodeAgent, MessageRole, Model, Tool


class ScriptedModel(Model):
    """Says what it is told to, and keeps what it was asked."""

    def __init__(self, answers):
        super().__init__(model_id="scripted")
        self.answers = iter(answers)
        self.asked = []

    def generate(self, messages, **_):
        self.asked.append(str(messages))
        return ChatMessage(role=MessageRole.ASSISTANT, content=next(self.answers))


class Price(Tool):
    name = "price"
    description = "The price of one piece."
    inputs = {"what": {"type": "string", "description": "What is bought."}}
    output_type = "integer"

    def forward(self, what: str) -> int:
        return {"pears": 3, "plums": 2}[what]


def step(thought, code):
    return f"Thought: {thought}\n<code>\n{code}\n</code>"


model = ScriptedModel([
    step("I look where I am.", "import os\nseen = open('/proc/version').read()\nprint('KERNEL', seen)"),
    step("I try what is not there.", "price(what='figs')"),
    step("Variables stay.", "total = sum(n * price(what=w) for w, n in basket.items())\nprint(bool(seen), total)"),
    step("That is it.", "final_answer({'total': total, 'pid': os.getpid()})"),
])
agent = CodeAgent(tools=[Price()], model=model, executor_type="e2b", verbosity_level=0)
try:
    answer = agent.run("What does the basket cost?", additional_args={"basket": {"pears": 4, "plums": 5}})
    assert answer["total"] == 22 and answer["pid"] > 0, answer
    # Each answer of the sandbox is in the next question.
    after = [model.asked[n + 1].split("Observation")[-1] for n in range(3)]
    assert "KERNEL Linux" in after[0], after[0]
    assert "KeyError" in model.asked[2] and "figs" in model.asked[2], model.asked[2]
    assert "True 22" in after[2], after[2]
finally:
    agent.cleanup()
print("the agent's code ran in the sandbox")
