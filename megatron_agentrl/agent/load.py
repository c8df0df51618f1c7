"""`module:Class` → the user's agent, with errors that say what to change."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any, cast

from megatron_agentrl.agent.types import Agent


class AgentLoadError(ValueError):
    """`agent.cls` does not name an agent that can be used."""


def load_agent(name: str) -> Agent:
    """An instance of the class that `name` (`module:Class`) names; the working directory is importable.

    Raises AgentLoadError. What the module raises while it is imported is passed on as it is.
    """
    module_name, separator, class_name = name.partition(":")
    if not (module_name and separator and class_name) or module_name.startswith("."):
        raise AgentLoadError(f"agent.cls {name!r}: expected module:Class, e.g. my_agents.search:SearchAgent")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise  # the module was found; something that it imports was not
        raise AgentLoadError(
            f"agent.cls {name!r}: no module {error.name!r}; it must be installed or lie under {here}"
        ) from error
    made: Any = getattr(module, class_name, None)
    if made is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
        raise AgentLoadError(f"agent.cls {name!r}: {module_name} has no {class_name}; it defines {', '.join(classes) or 'no class'}")
    if not inspect.isclass(made):
        raise AgentLoadError(f"agent.cls {name!r}: {class_name} is no class but {type(made).__name__}")
    if not inspect.iscoroutinefunction(getattr(made, "run", None)):
        raise AgentLoadError(f"agent.cls {name!r}: {class_name} needs `async def run(self, task, chat) -> Result`")
    try:
        return cast(Agent, made())
    except TypeError as error:
        raise AgentLoadError(f"agent.cls {name!r}: {class_name}() failed: {error}; it is built without arguments") from error
