{{- define "warmroute.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "warmroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "warmroute.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "warmroute.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "component" "router"): what selects a component's pods; never changes over upgrades */}}
{{- define "warmroute.selector" -}}
app.kubernetes.io/name: {{ include "warmroute.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_") }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "warmroute.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end -}}

{{- define "warmroute.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "warmroute.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "warmroute.fullname" .) -}}
{{- end -}}

{{- define "warmroute.discoveryNamespace" -}}
{{- .Values.discovery.namespace | default .Release.Namespace -}}
{{- end -}}

{{/* the label of this chart's own vLLM pods, and so the default selector */}}
{{- define "warmroute.fleetLabel" -}}
warmroute.dev/fleet: {{ include "warmroute.fullname" . }}
{{- end -}}

{{- define "warmroute.discoveryArgs" -}}
- --discovery=kubernetes
- --namespace={{ include "warmroute.discoveryNamespace" . }}
{{- with .Values.discovery }}
{{- if .service }}
- --service={{ .service }}
{{- else if .selector }}
{{- $parts := list }}
{{- range $key, $value := .selector }}
{{- $parts = append $parts (printf "%s=%s" $key (toString $value)) }}
{{- end }}
- --selector={{ join "," $parts }}
{{- else }}
- --selector={{ include "warmroute.fleetLabel" $ | replace ": " "=" }}
{{- end }}
{{- if .podPort }}
- --pod-port={{ int .podPort }}
{{- end }}
{{- if .eventsPort }}
- --events-port={{ int .eventsPort }}
{{- end }}
{{- if .replayPort }}
- --replay-port={{ int .replayPort }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "warmroute.bundledValkey" -}}
{{- if and .Values.index.shared (not .Values.redis.url) (not .Values.redis.existingSecret) }}true{{ end -}}
{{- end -}}

{{- define "warmroute.keySeedSecret" -}}
{{- .Values.keySeed.existingSecret | default (printf "%s-key-seed" (include "warmroute.fullname" .)) -}}
{{- end -}}

{{- define "warmroute.valkeySecret" -}}
{{- .Values.valkey.existingSecret | default (printf "%s-valkey" (include "warmroute.fullname" .)) -}}
{{- end -}}

{{- define "warmroute.valkeyKey" -}}
{{- .Values.valkey.existingSecret | empty | ternary "password" .Values.valkey.key -}}
{{- end -}}

{{/* environment that router and indexer share */}}
{{- define "warmroute.indexEnv" -}}
{{- if .Values.index.shared }}
{{- if .Values.redis.existingSecret }}
- name: WARMROUTE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.existingSecret }}
      key: {{ .Values.redis.key }}
{{- else if .Values.redis.url }}
- name: WARMROUTE_REDIS_URL
  {{- $ca := printf "%sssl_ca_certs=/redis-ca/ca.crt" (ternary "&" "?" (contains "?" .Values.redis.url)) }}
  value: {{ printf "%s%s" .Values.redis.url (ternary "" $ca (empty .Values.redis.caSecret)) | quote }}
{{- else }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "warmroute.valkeySecret" . }}
      key: {{ include "warmroute.valkeyKey" . }}
- name: WARMROUTE_REDIS_URL
  value: redis://:$(VALKEY_PASSWORD)@{{ include "warmroute.fullname" . }}-valkey:6379/0
{{- end }}
- name: WARMROUTE_KEY_SEED
  valueFrom:
    secretKeyRef:
      name: {{ include "warmroute.keySeedSecret" . }}
      key: {{ .Values.keySeed.existingSecret | empty | ternary "seed" .Values.keySeed.key }}
{{- end }}
{{- end -}}

{{- define "warmroute.podSecurity" -}}
{{- toYaml .Values.podSecurityContext -}}
{{- end -}}

{{- define "warmroute.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* (dict "root" $ "component" "router"): prefer to sit on different zones and nodes, never refuse to start for it */}}
{{- define "warmroute.spread" -}}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "warmroute.selector" $ | nindent 6 }}
{{- end }}
{{- end -}}

{{/* (dict "what" "router" "preStop" 5 "drain" 120 "grace" nil): the grace period, or a refusal */}}
{{- define "warmroute.grace" -}}
{{- $least := add (int .preStop) (int .drain) 15 -}}
{{- if kindIs "invalid" .grace -}}
{{- $least -}}
{{- else if lt (int .grace) (int $least) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: Kubernetes would kill streams that are still draining; set it to %d or more (preStop %d + drain %d + 15), or leave it null" .what (int .grace) (int $least) (int .preStop) (int .drain)) -}}
{{- else -}}
{{- int .grace -}}
{{- end -}}
{{- end -}}

{{/* a quantity such as 1.5Gi in bytes */}}
{{- define "warmroute.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $text := toString . -}}
{{- mulf (regexFind "^[0-9.]+(e\\+?[0-9]+)?" $text | float64) (get $units (regexFind "[A-Za-z]*$" $text) | default 1 | float64) | int64 -}}
{{- end -}}

{{- define "warmroute.checks" -}}
{{- $memory := include "warmroute.bytes" .Values.router.resources.limits.memory | int64 -}}
{{- $bodies := int64 .Values.router.bufferedBodiesMaxBytes -}}
{{- if gt (add $bodies 268435456) $memory -}}
{{- fail (printf "router.bufferedBodiesMaxBytes (%d) and 256Mi for the router itself do not fit into router.resources.limits.memory (%v): a burst of long requests would have it killed; lower the one or raise the other" $bodies .Values.router.resources.limits.memory) -}}
{{- end -}}
{{- if include "warmroute.bundledValkey" . -}}
{{- if gt (mul (int64 .Values.valkey.maxMemoryMiB) 1153434) (include "warmroute.bytes" .Values.valkey.resources.limits.memory | int64) -}}
{{- fail (printf "valkey.maxMemoryMiB is %d: with a tenth for Valkey itself that is more than valkey.resources.limits.memory (%v), and it would be killed before it forgets" (int .Values.valkey.maxMemoryMiB) .Values.valkey.resources.limits.memory) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.discovery.service .Values.discovery.selector -}}
{{- fail "discovery.service and discovery.selector are both set; give one of them" -}}
{{- end -}}
{{- if and .Values.vllm.models (ne (include "warmroute.discoveryNamespace" .) .Release.Namespace) -}}
{{- fail (printf "vllm.models makes pods in %s, but discovery.namespace is %s: they would never be found; leave one of the two out" .Release.Namespace .Values.discovery.namespace) -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is off: name the one to use in serviceAccount.name" -}}
{{- end -}}
{{- range $scaler := list "hpa" "keda" -}}
{{- $s := get $.Values.router $scaler -}}
{{- if and $s.enabled (gt (int $s.minReplicas) (int $s.maxReplicas)) -}}
{{- fail (printf "router.%s.minReplicas is %d, more than maxReplicas (%d)" $scaler (int $s.minReplicas) (int $s.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.router.hpa.enabled .Values.router.keda.enabled -}}
{{- fail "router.hpa.enabled and router.keda.enabled are both on; two autoscalers would fight over one Deployment" -}}
{{- end -}}
{{- if and .Values.router.keda.enabled (not .Values.router.keda.prometheusUrl) -}}
{{- fail "router.keda.enabled needs router.keda.prometheusUrl, for example http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- if and .Values.redis.caSecret .Values.redis.url (not (hasPrefix "rediss://" .Values.redis.url)) -}}
{{- fail "redis.caSecret is given, but redis.url is not rediss://, so nothing would be encrypted" -}}
{{- end -}}
{{- if and .Values.redis.url (contains "@" .Values.redis.url) -}}
{{- fail "redis.url holds credentials, which would be readable in the Deployment; put the whole URL into a Secret and name it in redis.existingSecret" -}}
{{- end -}}
{{- if and .Values.loadtest.compare.enabled (not .Values.router.allowPolicyHeader) -}}
{{- fail "loadtest.compare.enabled needs router.allowPolicyHeader, or every arm would run under the same policy" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs, for example [{name: public, namespace: gateways}]" -}}
{{- end -}}
{{- range .Values.vllm.models -}}
{{- $ranks := int (.dataParallelSize | default 1) -}}
{{- if and (gt $ranks 1) $.Values.discovery.eventsPort $.Values.discovery.replayPort -}}
{{- $gap := sub (int $.Values.discovery.replayPort) (int $.Values.discovery.eventsPort) -}}
{{- if lt (int (max $gap (sub 0 $gap))) $ranks -}}
{{- fail (printf "vllm.models %s: %d data-parallel ranks use the ports from %d and from %d on, which overlap; move discovery.replayPort" .name $ranks (int $.Values.discovery.eventsPort) (int $.Values.discovery.replayPort)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
