"""An endpoint as agents know it: the wire protocols of language models over whatever writes the turns."""
