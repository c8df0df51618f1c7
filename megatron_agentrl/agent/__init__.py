"""What a user writes against: Task, Agent, Env, Result, rewards."""
