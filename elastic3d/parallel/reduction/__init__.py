"""How the gradients of a step's micro-batches become the gradient of the step."""
