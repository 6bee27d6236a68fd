"""A student learns from a teacher (KL, batchmean) and labels; both terms of a part carry its share of the rows."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(18)
teacher = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 5)).eval()
student = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5))
optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
T, alpha = 3.0, 0.7
inputs, labels = torch.randn(44, 10), torch.randint(0, 5, (44,))

# %% before
running_loss = 0.0
for x, y in zip(inputs.split(16), labels.split(16)):
    optimizer.zero_grad()
    with torch.no_grad():
        teacher_logits = teacher(x)
    student_logits = student(x)
    soft = F.kl_div(F.log_softmax(student_logits / T, 1), F.softmax(teacher_logits / T, 1), reduction="batchmean") * T**2
    hard = F.cross_entropy(student_logits, y)
    loss = alpha * soft + (1 - alpha) * hard
    loss.backward()
    optimizer.step()
    running_loss += loss.item()
print(f"Train loss {running_loss / 3:.6f}")

# %% after
running_loss = 0.0
for x, y in zip(inputs.split(16), labels.split(16)):
    optimizer.zero_grad()
    sums, of_teacher, of_student = torch.zeros(3), [], []
    for x_part, y_part in zip(x.split(5), y.split(5)):
        share = len(x_part) / len(x)
        with torch.no_grad():
            teacher_logits = teacher(x_part)
        student_logits = student(x_part)
        soft = F.kl_div(F.log_softmax(student_logits / T, 1), F.softmax(teacher_logits / T, 1), reduction="batchmean") * T**2
        hard = F.cross_entropy(student_logits, y_part)
        loss = alpha * soft + (1 - alpha) * hard
        (loss * share).backward()
        sums += torch.stack([soft.detach(), hard.detach(), loss.detach()]) * share
        of_teacher.append(teacher_logits)
        of_student.append(student_logits.detach())
    soft, hard, loss = sums
    teacher_logits, student_logits = torch.cat(of_teacher), torch.cat(of_student)
    optimizer.step()
    running_loss += loss.item()
print(f"Train loss {running_loss / 3:.6f}")
