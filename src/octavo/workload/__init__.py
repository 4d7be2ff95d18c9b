"""Who asks for what and when: lengths, arrivals, traces and prompts. No torch, no clock."""
