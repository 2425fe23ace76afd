"""The reinforcement-learning loop: task, checkpoint preparation, plan, controller, weight publication."""
