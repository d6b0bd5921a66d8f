"""What carries the result of an action from one worker to another."""
