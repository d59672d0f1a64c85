-- cancel: a job is to end.
-- Guarantee: a queued job (in any phase) is final in this call; a scheduled or running one is flagged and its worker told, and is
--   final by its holder's commit or by the reaper; a success that came first stands.
-- Keys: root. Arguments: id.
-- Returns: {'cancelled'}, {'asked'}, {'too_late', state} or {'missing'} (a range of an array is no job).
local function end_waiting(P, j, now)
  local answer, entry = {'cancelled'}, j.entry
  if j.count ~= '' then answer = H.cancel_array(P, j, now) else H.finish(P, j, 'cancelled', 'cancelled', {}, now) end
  if entry ~= '' and redis.call('EXISTS', P .. 'earmarks') == 1 then H.ring_next(P, j.sig, now, nil, j) end
  return answer
end

register('cancel', {'allow-oom'}, function(K, A)
  local P, now = K[1], H.now()
  local j = H.load(P, A[1])
  if not j or j.parent ~= '' then return {'missing'} end
  if H.FINAL[j.state] then return {'too_late', j.state} end
  if j.count ~= '' or j.state == 'queued' then return end_waiting(P, j, now) end
  if j.cancel == '' then
    redis.call('HSET', H.job(P, j.id), 'cancel', now)
    H.mail(P, j.worker, 'cancel', 'job', j.id)
  end
  return {'asked'}
end)
