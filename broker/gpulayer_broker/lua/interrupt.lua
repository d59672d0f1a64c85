-- interrupt: a running job is to be interrupted, as by Ctrl-C; what becomes of it is its own affair.
-- Guarantee: nothing of the record changes; only the worker that holds the current attempt is told, and which attempt is meant.
-- Keys: root. Arguments: id.
-- Returns: {'asked'}, {'not_running', state}, or {'missing'} (an array, and a range of one, is nobody's one process).
register('interrupt', {'allow-oom'}, function(K, A)
  local P = K[1]
  local j = H.load(P, A[1])
  if not j or j.parent ~= '' or j.count ~= '' then return {'missing'} end
  if j.state ~= 'running' then return {'not_running', j.state} end
  H.mail(P, j.worker, 'interrupt', 'job', j.id, 'token', j.token)
  return {'asked'}
end)
