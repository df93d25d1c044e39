"""The files a job begins with, as `elastic3d init` writes them: a script, and what starts it in one kind of place.

    job       what a person says about the job, checked
    places    the kinds of places, and which files each takes
    files     the templates, with the job's own values in them
    writing   what is written, over what, and how

The templates are the files in deploy/, which lie here as links and in the wheel as files: what tests/deploy validates
is what init writes, with other names and numbers in it. There is no settings file. Each setting has one home already
(the script has the model, its data and its store; torchrun's line has the nodes, etcd and the run id), and a file
beside these would need rules for which of them wins.
"""
