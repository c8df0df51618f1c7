"""What users write against: rewards, environments, loading."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from examples.arithmetic.agent import ArithmeticAgent
from megatron_agentrl.agent.builtin import SingleTurnAgent
from megatron_agentrl.agent.env import EnvAgent, Step
from megatron_agentrl.agent.load import AgentLoadError, load_agent
from megatron_agentrl.agent.rewards import UnscorableTask, score
from megatron_agentrl.agent.types import Task


class Message:
    def __init__(self, content=None, tool_calls=None):
        self.content, self.tool_calls = content, tool_calls

    def model_dump(self, exclude_none=False):
        return {k: v for k, v in {"role": "assistant", "content": self.content, "tool_calls": self.tool_calls}.items() if v is not None}


class ScriptedChat:
    """A chat endpoint that says its lines and keeps what it was sent."""

    base_url, api_key, model, max_turns = "http://x", "k", "policy", 3

    def __init__(self, *lines, finish="stop"):
        self.lines, self.finish, self.sent = list(lines), finish, []

    def openai(self):
        return SimpleNamespace(chat=SimpleNamespace(completions=self))

    async def create(self, **request):
        self.sent.append({**request, "messages": list(request["messages"])})
        return SimpleNamespace(choices=[SimpleNamespace(message=self.lines.pop(0), finish_reason=self.finish)])


TASK = Task("t", [{"role": "user", "content": "6*7?"}], "42")


@pytest.mark.parametrize(("content", "reward"), [("42", 1.0), (" 42\n", 1.0), ("42.", 0.0), ("", 0.0), (None, 0.0)])
def test_the_single_turn_agent_scores_by_exact_match(content, reward):
    chat = ScriptedChat(Message(content))
    result = asyncio.run(SingleTurnAgent().run(TASK, chat))
    assert (result.reward, result.metrics) == (reward, {"finished": 1.0})
    assert chat.sent == [{"model": "policy", "messages": TASK.messages}]


def test_a_task_without_an_answer_is_no_reward_of_zero():
    with pytest.raises(UnscorableTask, match="task t has no answer"):
        score(Task("t", []), "42")


def test_a_reasoning_gym_task_is_scored_by_its_own_rule():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    task = Task("t", [], "ignored", {"reasoning_gym": {"task": "chain_sum", "entry": entry}})
    assert score(task, f" {entry['answer']} ") == 1.0
    assert score(task, "no number") < 1.0
    assert score(task, "") < 1.0


@pytest.mark.parametrize(
    ("content", "reward", "form"),
    [
        ("<answer>42</answer>", 1.0, 1.0),
        ("It is <answer> 42 </answer>, I think", 1.0, 1.0),
        ("<answer>41</answer>", 0.3, 1.0),
        ("<answer>41</answer><answer>42</answer>", 0.0, 0.0),  # every number listed is no answer
        ("42", 0.0, 0.0),
        ("<answer>42", 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
def test_the_arithmetic_agent_pays_for_one_answer_in_its_tags_and_for_the_number(content, reward, form):
    chat = ScriptedChat(Message(content))
    result = asyncio.run(ArithmeticAgent().run(TASK, chat))
    assert (result.reward, result.metrics) == (reward, {"format": form, "correct": float(reward == 1.0)})
    assert chat.sent[0]["messages"][3:] == TASK.messages  # below the example


class CountingEnv:
    """Wants the tool called twice, then the word done."""

    tools = [{"type": "function", "function": {"name": "tick", "parameters": {}}}]

    async def reset(self, task):
        self.ticks = 0
        return [*task.messages, {"role": "user", "content": "tick twice"}]

    async def step(self, message):
        if message.get("content") == "done":
            return Step(done=True)
        self.ticks += 1
        return Step([{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": str(self.ticks)}])

    async def reward(self):
        return float(self.ticks == 2)


class CountingAgent(EnvAgent):
    env = CountingEnv


CALL = Message(tool_calls=[{"id": "c", "type": "function", "function": {"name": "tick", "arguments": "{}"}}])


def test_an_env_is_run_over_the_chat_endpoint():
    chat = ScriptedChat(CALL, CALL, Message("done"))
    result = asyncio.run(CountingAgent().run(TASK, chat))
    assert (result.reward, result.metrics) == (1.0, {"turns": 3.0, "cut": 0.0})
    assert [len(request["messages"]) for request in chat.sent] == [2, 4, 6]
    assert chat.sent[2]["messages"][-1] == {"role": "tool", "tool_call_id": "c", "content": "2"}
    assert chat.sent[0]["tools"] == CountingEnv.tools


@pytest.mark.parametrize(("lines", "finish", "turns"), [([CALL] * 9, "stop", 3), ([CALL] * 9, "length", 1)])
def test_an_episode_ends_at_the_turn_limit_and_at_a_cut_reply(lines, finish, turns):
    result = asyncio.run(CountingAgent().run(TASK, ScriptedChat(*lines, finish=finish)))
    assert result.metrics == {"turns": float(turns), "cut": float(finish == "length")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_agents", "expected module:Class"),
        (":X", "expected module:Class"),
        (".my_agents:X", "expected module:Class"),
        ("no_such_module_here:X", "no module 'no_such_module_here'; it must be installed or lie under"),
        ("my_agents:Missing", "my_agents has no Missing; it defines Good, Lazy, Needy"),
        ("my_agents:value", "is no class but int"),
        ("my_agents:Lazy", "needs `async def run"),
        ("my_agents:Needy", "it is built without arguments"),
    ],
)
def test_an_agent_that_cannot_be_loaded_says_why(tmp_path, monkeypatch, name, message):
    write_agents(tmp_path, monkeypatch)
    with pytest.raises(AgentLoadError, match=message):
        load_agent(name)


def test_an_agent_in_the_working_directory_is_loaded(tmp_path, monkeypatch):
    write_agents(tmp_path, monkeypatch)
    assert type(load_agent("my_agents:Good")).__name__ == "Good"
    assert type(load_agent("examples.calculator.agent:CalculatorAgent")).__name__ == "CalculatorAgent"


def test_a_missing_dependency_of_the_agents_module_is_not_blamed_on_its_name(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_agent("needs_more:X")


def write_agents(folder, monkeypatch):
    (folder / "my_agents.py").write_text(
        "value = 3\n"
        "class Good:\n    async def run(self, task, chat): ...\n"
        "class Lazy:\n    def run(self, task, chat): ...\n"
        "class Needy:\n    def __init__(self, x): ...\n    async def run(self, task, chat): ...\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_agents", None)
