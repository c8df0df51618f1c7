"""Runs the supervisor as a program of its own, so that tests can signal and kill it: run_dir, then roles as JSON."""

import json
import sys
from pathlib import Path

from megatron_agentrl.launch.supervisor import Role, run
from megatron_agentrl.recipe.schema import Recipe

recipe = Recipe()
recipe.deadlines.stop = 1.0
sys.exit(run(recipe, [Role(**role) for role in json.loads(sys.argv[2])], Path(sys.argv[1])))
