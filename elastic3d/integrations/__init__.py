"""Other projects' own ways of training, driven by a `Run` or saving to our stores. Each is imported when it is used."""
