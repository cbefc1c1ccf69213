"""Host time per layer of plain modules, torch FSDP2 and this project, where communication costs nothing."""
