"""Forward and backward passes of one model: what they contain, in which order they run, and how they are sent."""
