"""The step loop and its two faces: in process (`llm`) and across processes (`client`)."""
