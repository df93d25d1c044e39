"""A trainer in the shape of Hugging Face's, driven by a `Run`.

trainer     the Trainer that a script makes
refusals    what it does not take, by name
arguments   which TrainingArguments are taken, and how they are made in a trainer
losses      the loss of a model, or a compute_loss_func, as (sum, count)
optimizers  the optimizer and the schedule that the arguments ask for
columns     what of a sample goes to the model
flow        callbacks, logs and evaluations, and what of them belongs to the state of a run
"""

from elastic3d.integrations.transformers.trainer import Trainer

__all__ = ["Trainer"]
