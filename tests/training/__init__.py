"""The state that a run resumes from, and the state that it leaves."""
